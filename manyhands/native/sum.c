/* Addition along a tree, in blocks that stay in the L1 cache. Additions are never fused with other operations. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef unsigned char byte;

size_t mh_item_bytes(int dtype) {
    static const size_t bytes[MH_NUM_DTYPES] = {4, 8, 2, 2, 8};
    return dtype >= 0 && dtype < MH_NUM_DTYPES ? bytes[dtype] : 0;
}

MH_FOR_THIS_CPU static void add_f32(float *to, const float *left, const float *right, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = left[i] + right[i];
}

MH_FOR_THIS_CPU static void add_f64(double *to, const double *left, const double *right, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = left[i] + right[i];
}

/* Overflow wraps, as in torch and numpy; in C that is defined only for unsigned numbers. */
MH_FOR_THIS_CPU static void add_i64(uint64_t *to, const uint64_t *left, const uint64_t *right, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = left[i] + right[i];
}

static inline float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(number != number ? 0x7fc0 : nearest_even);
}

MH_FOR_THIS_CPU static void add_bf16(uint16_t *to, const uint16_t *left, const uint16_t *right, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = to_bf16(from_bf16(left[i]) + from_bf16(right[i]));
}

MH_FOR_THIS_CPU static void add_f16(_Float16 *to, const _Float16 *left, const _Float16 *right, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = (_Float16)((float)left[i] + (float)right[i]);
}

static void add(void *to, const void *left, const void *right, size_t count, int dtype) {
    switch (dtype) {
    case MH_F32: add_f32(to, left, right, count); break;
    case MH_F64: add_f64(to, left, right, count); break;
    case MH_BF16: add_bf16(to, left, right, count); break;
    case MH_F16: add_f16(to, left, right, count); break;
    default: add_i64(to, left, right, count); break;
    }
}

int mh_check_program(const int32_t *program, size_t length, size_t num_sources) {
    size_t depth = 0;
    for (size_t i = 0; i < length; i++) {
        if (program[i] == MH_ADD) {
            if (depth < 2) return MH_BAD_ARGUMENT;
            depth--;
        } else {
            if (program[i] < 0 || (size_t)program[i] >= num_sources || depth == MH_MAX_DEPTH) return MH_BAD_ARGUMENT;
            depth++;
        }
    }
    return depth == 1 ? 0 : MH_BAD_ARGUMENT;
}

static size_t depth_of(const int32_t *program, size_t length) {
    size_t depth = 0, deepest = 0;
    for (size_t i = 0; i < length; i++) {
        depth = program[i] == MH_ADD ? depth - 1 : depth + 1;
        if (depth > deepest) deepest = depth;
    }
    return deepest;
}

/* One block: the stack has pointers to a source, or to the scratch block of that depth. */
static void sum_block(byte *target, const void *const *sources, size_t offset, const int32_t *program, size_t length,
                      size_t count, int dtype, byte *scratch) {
    const byte *stack[MH_MAX_DEPTH];
    size_t depth = 0;
    for (size_t i = 0; i < length; i++) {
        if (program[i] != MH_ADD) {
            stack[depth++] = (const byte *)sources[program[i]] + offset;
            continue;
        }
        depth--;
        byte *to = i + 1 == length ? target : scratch + (depth - 1) * MH_BLOCK_BYTES;
        add(to, stack[depth - 1], stack[depth], count, dtype);
        stack[depth - 1] = to;
    }
}

int mh_sum(void *target, const void *const *sources, const int32_t *program, size_t length, size_t count, int dtype) {
    size_t item = mh_item_bytes(dtype), block = MH_BLOCK_BYTES / item;
    if (length == 1) {
        memmove(target, sources[program[0]], count * item);
        return 0;
    }
    size_t depth = depth_of(program, length);
    byte *scratch = NULL;
    if (depth > 2 || length > 3) {
        scratch = malloc(depth * MH_BLOCK_BYTES);
        if (scratch == NULL) return MH_NO_MEMORY;
    }
    for (size_t start = 0; start < count; start += block) {
        size_t here = count - start < block ? count - start : block;
        sum_block((byte *)target + start * item, sources, start * item, program, length, here, dtype, scratch);
    }
    free(scratch);
    return 0;
}

void mh_sum_block(void *target, const void *const *sources, size_t offset, const int32_t *program, size_t length,
                  size_t count, int dtype, unsigned char *scratch) {
    if (length == 1) {
        memcpy(target, (const byte *)sources[program[0]] + offset, count * mh_item_bytes(dtype));
    } else {
        sum_block(target, sources, offset, program, length, count, dtype, scratch);
    }
}
