/* Optimizers on flat memory: the gradient is summed along its tree and applied block by block, while it is in the L1
 * cache. Each optimizer follows torch's sequence of operations. Start reading at mh_update. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK (MH_BLOCK_BYTES / sizeof(float))

/* One block of a piece: `given` is its gradient, `g` a buffer for a gradient that may be changed, `free` another
 * buffer. */
struct block {
    const float *given;
    float *g, *free;
    const float *w;
    float *to;
    const float *from[MH_MAX_STATES];
    float *state[MH_MAX_STATES];
    size_t count;
    int past_caches; /* new values are not read soon: use streaming stores, which do not read the target first */
};

struct vector_ops {
    void (*scale)(float *to, const float *a, float factor, size_t count);
    void (*add_scaled)(float *to, const float *a, float alpha, const float *b, size_t count);
    void (*add_product)(float *to, const float *a, float value, const float *b, const float *c, size_t count);
    void (*add_quotient)(float *to, const float *a, float value, const float *b, const float *c, size_t count);
    void (*interpolate)(float *to, const float *a, const float *b, float weight, size_t count);
    void (*root)(float *to, const float *a, float divisor, float eps, size_t count);
    void (*larger)(float *to, const float *a, const float *b, size_t count);
    void (*momentum)(const struct mh_update *u, const struct block *b);
};

#define FOR_CPU(name) any_##name
#include "vector_ops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define FOR_CPU(name) haswell_##name
#include "vector_ops.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define FOR_CPU(name) skylake_##name
#include "vector_ops.h"
#pragma GCC pop_options

static const struct vector_ops *ops_for_this_cpu(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw")) {
        return &skylake_ops;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &haswell_ops : &any_ops;
}
#else
static const struct vector_ops *ops_for_this_cpu(void) { return &any_ops; }
#endif

static void sgd(const struct vector_ops *v, const struct mh_update *u, struct block *b) {
    const float *step = b->g;
    if (u->weight_decay != 0) v->add_scaled(b->g, b->g, u->weight_decay, b->w, b->count);
    if (u->momentum != 0) {
        if (u->first) {
            memcpy(b->state[0], b->g, b->count * sizeof(float));
        } else {
            v->scale(b->state[0], b->from[0], u->momentum, b->count);
            v->add_scaled(b->state[0], b->state[0], u->gradient_share, b->g, b->count);
        }
        if (u->nesterov) v->add_scaled(b->g, b->g, u->momentum, b->state[0], b->count);
        step = u->nesterov ? b->g : b->state[0];
    }
    v->add_scaled(b->to, b->w, u->step_size, step, b->count);
}

static void adam(const struct vector_ops *v, const struct mh_update *u, struct block *b) {
    const float *w = b->w, *second = b->state[1];
    if (u->shrink != 1) {
        v->scale(b->to, w, u->shrink, b->count);
        w = b->to;
    }
    if (u->weight_decay != 0) v->add_scaled(b->g, b->g, u->weight_decay, w, b->count);
    v->interpolate(b->state[0], b->from[0], b->g, u->gradient_share, b->count);
    v->scale(b->state[1], b->from[1], u->second_keep, b->count);
    v->add_product(b->state[1], b->state[1], u->second_share, b->g, b->g, b->count);
    if (u->extra) {
        v->larger(b->state[2], b->from[2], b->state[1], b->count);
        second = b->state[2];
    }
    v->root(b->free, second, u->root_divisor, u->eps, b->count);
    v->add_quotient(b->to, w, u->step_size, b->state[0], b->free, b->count);
}

static void adagrad(const struct vector_ops *v, const struct mh_update *u, struct block *b) {
    if (u->weight_decay != 0) v->add_scaled(b->g, b->g, u->weight_decay, b->w, b->count);
    v->add_product(b->state[0], b->from[0], 1.0f, b->g, b->g, b->count);
    v->root(b->free, b->state[0], 1.0f, u->eps, b->count);
    v->add_quotient(b->to, b->w, u->step_size, b->g, b->free, b->count);
}

/* States: the average of squares, the momentum if there is one, the average of gradients if centered. */
static void rmsprop(const struct vector_ops *v, const struct mh_update *u, struct block *b) {
    if (u->weight_decay != 0) v->add_scaled(b->g, b->g, u->weight_decay, b->w, b->count);
    v->scale(b->state[0], b->from[0], u->second_keep, b->count);
    v->add_product(b->state[0], b->state[0], u->second_share, b->g, b->g, b->count);
    const float *square = b->state[0];
    if (u->extra) {
        v->interpolate(b->state[2], b->from[2], b->g, u->second_share, b->count);
        v->add_product(b->free, b->state[0], -1.0f, b->state[2], b->state[2], b->count);
        square = b->free;
    }
    v->root(b->free, square, 1.0f, u->eps, b->count);
    if (u->momentum > 0) {
        v->scale(b->state[1], b->from[1], u->momentum, b->count);
        v->add_quotient(b->state[1], b->state[1], 1.0f, b->g, b->free, b->count);
        v->add_scaled(b->to, b->w, u->step_size, b->state[1], b->count);
    } else {
        v->add_quotient(b->to, b->w, u->step_size, b->g, b->free, b->count);
    }
}

static void (*const optimizers[MH_NUM_OPTIMIZERS])(const struct vector_ops *, const struct mh_update *, struct block *) = {
    sgd, adam, adagrad, rmsprop};

/* Pieces that are written to another copy and are at least this large would hardly be in a cache at their next use. */
#define WORTH_STREAMING_BYTES ((size_t)4 << 20)

static int is_streamed(const float *from, const float *to) { return to == NULL || (to != from && (uintptr_t)to % 64 == 0); }

static int goes_past_caches(const struct mh_piece *piece) {
    if (piece->count * sizeof(float) < WORTH_STREAMING_BYTES || !is_streamed(piece->w, piece->to)) return 0;
    for (size_t i = 0; i < MH_MAX_STATES; i++) {
        if (!is_streamed(piece->from[i], piece->state[i])) return 0;
    }
    return 1;
}

static void place_block(const struct mh_piece *piece, size_t start, struct block *b) {
    b->w = piece->w + start;
    b->to = piece->to + start;
    for (size_t i = 0; i < MH_MAX_STATES; i++) {
        b->from[i] = piece->from[i] == NULL ? NULL : piece->from[i] + start;
        b->state[i] = piece->state[i] == NULL ? NULL : piece->state[i] + start;
    }
}

static void update_block(const struct vector_ops *v, const struct mh_update *u, struct block *b) {
    if (u->optimizer == MH_SGD && u->momentum != 0 && !u->first) {
        v->momentum(u, b);
        return;
    }
    if (b->given != b->g) memcpy(b->g, b->given, b->count * sizeof(float));
    /* In torch's order: divide by weights and loss scale, clip, negate. Each is rounded. */
    if (u->factor != 1) v->scale(b->g, b->g, u->factor, b->count);
    if (u->clip != 1) v->scale(b->g, b->g, u->clip, b->count);
    if (u->maximize) v->scale(b->g, b->g, -1.0f, b->count);
    optimizers[u->optimizer](v, u, b);
}

/* Streaming stores are not ordered with other stores. After this fence, a thread that sees a later write of this thread
 * also sees its earlier ones. */
static void order_stores(void) {
#ifdef __x86_64__
    __builtin_ia32_sfence();
#endif
}

/* The digest of a block's weights and states, which are in the L1 cache. */
static uint64_t digest_of(const float *w, const float *const *states, size_t count) {
    struct mh_digest digest = {0};
    mh_digest_add(&digest, w, count * sizeof(float));
    for (size_t i = 0; i < MH_MAX_STATES; i++) {
        if (states[i] != NULL) mh_digest_add(&digest, states[i], count * sizeof(float));
    }
    return mh_digest_end(&digest);
}

int mh_update(const struct mh_update *u, const struct mh_piece *pieces, size_t num_pieces, const void *const *sources,
              size_t num_sources, const int32_t *program, size_t length, const struct mh_watch *watch) {
    static const struct vector_ops *v;
    if (v == NULL) v = ops_for_this_cpu();
    if (u->optimizer < 0 || u->optimizer >= MH_NUM_OPTIMIZERS) return MH_BAD_ARGUMENT;
    if (mh_check_program(program, length, num_sources)) return MH_BAD_ARGUMENT;
    unsigned char *memory = malloc((2 + MH_MAX_DEPTH) * MH_BLOCK_BYTES);
    if (memory == NULL) return MH_NO_MEMORY;
    order_stores();
    uint64_t number = 0;
    struct block block = {.g = (float *)memory, .free = (float *)(memory + MH_BLOCK_BYTES)};
    for (size_t i = 0; i < num_pieces; i++) {
        const void *const *rows = sources + i * num_sources;
        block.past_caches = goes_past_caches(&pieces[i]);
        for (size_t start = 0; start < pieces[i].count; start += BLOCK) {
            block.count = pieces[i].count - start < BLOCK ? pieces[i].count - start : BLOCK;
            block.given = length == 1 ? (const float *)rows[program[0]] + start : block.g;
            if (length > 1) {
                mh_sum_block(block.g, rows, start * sizeof(float), program, length, block.count, MH_F32,
                             memory + 2 * MH_BLOCK_BYTES);
            }
            place_block(&pieces[i], start, &block);
            if (watch != NULL) watch->found[number] = digest_of(block.w, block.from, block.count);
            update_block(v, u, &block);
            if (watch != NULL) {
                watch->left[number] = digest_of(block.to, (const float *const *)block.state, block.count);
            }
            number++;
        }
    }
    order_stores();
    free(memory);
    return 0;
}
