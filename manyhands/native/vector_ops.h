/* The elementwise operations of optimizers, each rounded as torch rounds it. Included once per kind of CPU by update.c,
 * with FOR_CPU(name) naming that CPU's version. If the CPU has fused multiply-add, torch uses it in
 * `add` with alpha, `addcmul` and `lerp`, and nowhere else; so does this. `to` may be any of the inputs, but not
 * overlap one in part. */

#define NO_OVERLAP _Pragma("GCC ivdep")

#ifdef __FMA__
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

static void FOR_CPU(scale)(float *to, const float *a, float factor, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = a[i] * factor;
}

static void FOR_CPU(add_scaled)(float *to, const float *a, float alpha, const float *b, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = MULTIPLY_ADD(alpha, b[i], a[i]);
}

static void FOR_CPU(add_product)(float *to, const float *a, float value, const float *b, const float *c, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = MULTIPLY_ADD(value * b[i], c[i], a[i]);
}

static void FOR_CPU(add_quotient)(float *to, const float *a, float value, const float *b, const float *c, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = a[i] + value * b[i] / c[i];
}

static void FOR_CPU(interpolate)(float *to, const float *a, const float *b, float weight, size_t count) {
    if (weight < 0.5f) {
        NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = MULTIPLY_ADD(weight, b[i] - a[i], a[i]);
    } else {
        NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = MULTIPLY_ADD(weight - 1.0f, b[i] - a[i], b[i]);
    }
}

/* sqrt(a) / divisor + eps. torch's square root is from a vector library, and may differ from this in the last bit. */
static void FOR_CPU(root)(float *to, const float *a, float divisor, float eps, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = __builtin_sqrtf(a[i]) / divisor + eps;
}

static void FOR_CPU(larger)(float *to, const float *a, const float *b, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = a[i] > b[i] || a[i] != a[i] ? a[i] : b[i];
}

/* The number of elements of one streaming store, which bypasses the caches; any number if the CPU has none. */
#if defined(__AVX512F__)
#define LANES 16
#define STREAM(to, from) __builtin_ia32_movntps512(to, *(const FOR_CPU(lanes) *)(from))
#elif defined(__AVX__)
#define LANES 8
#define STREAM(to, from) __builtin_ia32_movntps256(to, *(const FOR_CPU(lanes) *)(from))
#else
#define LANES 8
#define STREAM(to, from) memcpy(to, from, LANES * sizeof(float))
#endif

typedef float FOR_CPU(lanes) __attribute__((vector_size(LANES * sizeof(float)), may_alias));

/* SGD with existing momentum: what `scale` and `add_scaled` do one after the other, in one pass. */
static inline void FOR_CPU(move)(const struct mh_update *u, const struct block *b, size_t start, size_t count,
                                 float *weights, float *momenta) {
    const float *g = b->given + start, *w = b->w + start, *from = b->from[0] + start;
    NO_OVERLAP for (size_t i = 0; i < count; i++) {
        float grad = g[i] * u->factor * u->clip * (u->maximize ? -1.0f : 1.0f); /* a factor of 1 changes nothing */
        if (u->weight_decay != 0) grad = MULTIPLY_ADD(u->weight_decay, w[i], grad);
        momenta[i] = MULTIPLY_ADD(u->gradient_share, grad, from[i] * u->momentum);
        float step = u->nesterov ? MULTIPLY_ADD(u->momentum, momenta[i], grad) : momenta[i];
        weights[i] = MULTIPLY_ADD(u->step_size, step, w[i]);
    }
}

static void FOR_CPU(momentum)(const struct mh_update *u, const struct block *b) {
    const struct mh_update how = *u; /* a copy that cannot alias the stores below */
    float weights[LANES] __attribute__((aligned(64))), momenta[LANES] __attribute__((aligned(64)));
    size_t i = 0;
    for (; i + LANES <= b->count; i += LANES) {
        FOR_CPU(move)(&how, b, i, LANES, weights, momenta);
        if (b->past_caches) {
            STREAM(b->to + i, weights);
            STREAM(b->state[0] + i, momenta);
        } else {
            memcpy(b->to + i, weights, sizeof weights);
            memcpy(b->state[0] + i, momenta, sizeof momenta);
        }
    }
    FOR_CPU(move)(&how, b, i, b->count - i, weights, momenta);
    memcpy(b->to + i, weights, (b->count - i) * sizeof(float));
    memcpy(b->state[0] + i, momenta, (b->count - i) * sizeof(float));
}

static const struct vector_ops FOR_CPU(ops) = {
    FOR_CPU(scale),       FOR_CPU(add_scaled), FOR_CPU(add_product), FOR_CPU(add_quotient),
    FOR_CPU(interpolate), FOR_CPU(root),       FOR_CPU(larger),      FOR_CPU(momentum),
};

#undef LANES
#undef STREAM

#undef NO_OVERLAP
#undef MULTIPLY_ADD
#undef FOR_CPU
