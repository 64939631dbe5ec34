/* The elementwise operations that optimizers are made of, each rounded as torch rounds it. Included once per kind of CPU
 * by update.c, with FOR_CPU(name) naming that CPU's version. Where the CPU has fused multiply-add, torch uses it in
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

/* sqrt(a) / divisor + eps. torch's own square root is a vector library's, and may differ from this in the last bit. */
static void FOR_CPU(root)(float *to, const float *a, float divisor, float eps, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = __builtin_sqrtf(a[i]) / divisor + eps;
}

static void FOR_CPU(larger)(float *to, const float *a, const float *b, size_t count) {
    NO_OVERLAP for (size_t i = 0; i < count; i++) to[i] = a[i] > b[i] || a[i] != a[i] ? a[i] : b[i];
}

static const struct vector_ops FOR_CPU(ops) = {
    FOR_CPU(scale),       FOR_CPU(add_scaled), FOR_CPU(add_product), FOR_CPU(add_quotient),
    FOR_CPU(interpolate), FOR_CPU(root),       FOR_CPU(larger),
};

#undef NO_OVERLAP
#undef MULTIPLY_ADD
#undef FOR_CPU
