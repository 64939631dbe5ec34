/* fp32 as 8-bit integers with one scale per block, in one pass each way. comm/codecs.py documents the format, and does
 * the same in Python, bit for bit, if this is not built. */
#include "core.h"

#include <string.h>

#define LARGEST_FINITE_BITS 0x7f7fffffu
#define SMALLEST_SCALE 0x1p-126f
/* Adding and subtracting it rounds numbers below 2^22 to integers, ties to even. */
#define ROUNDER 12582912.0f

/* The largest magnitude, as bits: those of infinities and NaN are larger than all others. */
MH_FOR_THIS_CPU static uint32_t largest(const float *values, size_t count) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffffu;
        found = bits > found ? bits : found;
    }
    return found;
}

MH_FOR_THIS_CPU static void add_to(float *to, const float *values, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] += values[i];
}

MH_FOR_THIS_CPU static void encode_block(const float *values, float inverse, int8_t *codes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float rounded = (values[i] * inverse + ROUNDER) - ROUNDER;
        codes[i] = (int8_t)(int32_t)rounded;
    }
}

MH_FOR_THIS_CPU static void keep_rest(float *residual, const int8_t *codes, float scale, size_t count) {
    for (size_t i = 0; i < count; i++) residual[i] -= (float)codes[i] * scale;
}

MH_FOR_THIS_CPU static void decode_block(const int8_t *codes, float scale, float *values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] = (float)codes[i] * scale;
}

MH_FOR_THIS_CPU static void add_block(const int8_t *codes, float scale, float *values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] += (float)codes[i] * scale;
}

void mh_int8_encode(const float *values, float *residual, float *scales, int8_t *codes, size_t count, size_t block) {
    for (size_t start = 0; start < count; start += block, scales++) {
        size_t here = count - start < block ? count - start : block;
        const float *wanted = values + start;
        if (residual != NULL) {
            add_to(residual + start, wanted, here);
            wanted = residual + start;
        }
        uint32_t bits = largest(wanted, here);
        if (bits > LARGEST_FINITE_BITS) { /* the block's values are lost, so there is no residual */
            uint32_t nan = 0x7fc00000u;
            memcpy(scales, &nan, sizeof nan);
            memset(codes + start, 0, here);
            if (residual != NULL) memset(residual + start, 0, here * sizeof(float));
            continue;
        }
        float magnitude;
        memcpy(&magnitude, &bits, sizeof bits);
        float scale = magnitude * (float)(1.0 / 127);
        if (scale < SMALLEST_SCALE) scale = 0;
        *scales = scale;
        encode_block(wanted, scale == 0 ? 0 : 1 / scale, codes + start, here);
        if (residual != NULL) keep_rest(residual + start, codes + start, scale, here);
    }
}

void mh_int8_decode(const float *scales, const int8_t *codes, float *values, size_t count, size_t block, int add) {
    for (size_t start = 0; start < count; start += block, scales++) {
        size_t here = count - start < block ? count - start : block;
        (add ? add_block : decode_block)(codes + start, *scales, values + start, here);
    }
}

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

MH_FOR_THIS_CPU void mh_bf16_add(const uint16_t *halves, float *values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] += from_bf16(halves[i]);
}
