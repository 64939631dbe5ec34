/* Initial values of a row, and how each optimizer updates it. Every operation is rounded separately and none is from a
 * math library, except powers other than 1/2 in FTRL: the same bits on every machine. A row is its weights, followed by
 * its optimizer state. */
#include "core.h"
#include "rows.h"

#include <math.h>
#include <string.h>

uint32_t mh_row_states(int optimizer, uint32_t dim) {
    switch (optimizer) {
    case MH_ROW_ADAGRAD: return dim;
    case MH_ROW_MEAN_ADAGRAD: return 1;
    case MH_ROW_ADAM: return 2 * dim + 1; /* two averages, and the number of gradients */
    case MH_ROW_FTRL: return 2 * dim;     /* z and n */
    default: return 0;
    }
}

/* Uniform in [-1, 1). */
static inline float even(uint64_t bits) { return (float)(bits >> 40) * 0x1p-23f - 1.0f; }

/* The sum of 12 uniform 16-bit numbers: approximately normal, standard deviation 1, cut off at 6. */
static inline float bell(uint64_t state) {
    uint32_t sum = 0;
    for (uint64_t word = 0; word < 3; word++) {
        uint64_t bits = mh_mix(state + word);
        for (unsigned part = 0; part < 4; part++) sum += (uint32_t)(bits >> (16 * part)) & 0xffff;
    }
    return ((float)sum + 6.0f) * 0x1p-16f - 6.0f;
}

void mh_row_weights(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim) {
    uint64_t state = mh_mix(rule->key ^ mh_mix((uint64_t)id));
    for (uint32_t j = 0; j < dim; j++) {
        switch (rule->start) {
        case MH_ROW_UNIFORM: row[j] = even(mh_mix(state + j)) * rule->scale; break;
        case MH_ROW_NORMAL: row[j] = bell(state + 3 * (uint64_t)j) * rule->scale; break;
        default: row[j] = 0; break;
        }
    }
}

static inline float power_of(const struct mh_rows_rule *rule, float n) {
    return rule->power == 0.5f ? __builtin_sqrtf(n) : powf(n, rule->power);
}

static inline float ftrl_divisor(const struct mh_rows_rule *rule, float power) {
    return (power + rule->beta) / rule->lr + rule->l2;
}

void mh_row_start(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim) {
    float *states = row + dim;
    mh_row_weights(rule, id, row, dim);
    memset(states, 0, mh_row_states(rule->optimizer, dim) * sizeof *states);
    if (rule->optimizer == MH_ROW_MEAN_ADAGRAD) states[0] = rule->accumulator;
    for (uint32_t j = 0; j < dim; j++) {
        if (rule->optimizer == MH_ROW_ADAGRAD) states[j] = rule->accumulator;
        if (rule->optimizer != MH_ROW_FTRL) continue;
        states[dim + j] = rule->accumulator;
        if (!rule->z_from_weight) continue;
        float sign = (float)((row[j] > 0) - (row[j] < 0));
        states[j] = -(row[j] * ftrl_divisor(rule, power_of(rule, rule->accumulator)) + sign * rule->l1);
    }
}

MH_FOR_THIS_CPU static void sgd(const struct mh_rows_rule *rule, float *row, const float *g, float factor, uint32_t dim) {
    for (uint32_t j = 0; j < dim; j++) row[j] -= rule->lr * (g[j] * factor);
}

MH_FOR_THIS_CPU static void adagrad(const struct mh_rows_rule *rule, float *row, const float *g, float factor,
                                    uint32_t dim) {
    float *restrict n = row + dim, *restrict w = row;
    for (uint32_t j = 0; j < dim; j++) {
        float gradient = g[j] * factor;
        n[j] += gradient * gradient;
        w[j] -= rule->lr * gradient / (__builtin_sqrtf(n[j]) + rule->eps);
    }
}

MH_FOR_THIS_CPU static void mean_adagrad(const struct mh_rows_rule *rule, float *row, const float *g, float factor,
                                         uint32_t dim) {
    float squares = 0;
    for (uint32_t j = 0; j < dim; j++) squares += (g[j] * factor) * (g[j] * factor);
    row[dim] += squares / (float)dim;
    float divisor = __builtin_sqrtf(row[dim]) + rule->eps;
    for (uint32_t j = 0; j < dim; j++) row[j] -= rule->lr * (g[j] * factor) / divisor;
}

static double whole_power(double base, uint32_t exponent) {
    double result = 1;
    for (; exponent; exponent >>= 1, base *= base) {
        if (exponent & 1) result *= base;
    }
    return result;
}

/* Each row counts its own gradients: steps without a gradient for the row do not decay its averages. */
MH_FOR_THIS_CPU static void adam(const struct mh_rows_rule *rule, float *row, const float *g, float factor, uint32_t dim) {
    float *restrict first = row + dim, *restrict second = row + 2 * dim, *restrict w = row;
    uint32_t steps;
    memcpy(&steps, row + 3 * dim, sizeof steps);
    steps += steps != UINT32_MAX;
    memcpy(row + 3 * dim, &steps, sizeof steps);
    float step_size = (float)((double)rule->lr / (1 - whole_power(rule->beta1, steps)));
    float divisor = (float)__builtin_sqrt(1 - whole_power(rule->beta2, steps));
    for (uint32_t j = 0; j < dim; j++) {
        float gradient = g[j] * factor;
        first[j] += (1 - rule->beta1) * (gradient - first[j]);
        second[j] = rule->beta2 * second[j] + (1 - rule->beta2) * (gradient * gradient);
        w[j] -= step_size * first[j] / (__builtin_sqrtf(second[j]) / divisor + rule->eps);
    }
}

/* The formulas are those of manyhands/optim/ftrl.py. */
MH_FOR_THIS_CPU static void ftrl(const struct mh_rows_rule *rule, float *row, const float *g, float factor, uint32_t dim) {
    float *restrict z = row + dim, *restrict n = row + 2 * dim, *restrict w = row;
    for (uint32_t j = 0; j < dim; j++) {
        float gradient = g[j] * factor, before = power_of(rule, n[j]);
        n[j] += gradient * gradient;
        float after = power_of(rule, n[j]);
        z[j] += gradient - (after - before) / rule->lr * w[j] + 2 * rule->shrinkage * w[j];
        float clipped = z[j] > rule->l1 ? rule->l1 : z[j] < -rule->l1 ? -rule->l1 : z[j];
        w[j] = clipped == z[j] ? 0 : (clipped - z[j]) / ftrl_divisor(rule, after);
    }
}

void mh_row_change(const struct mh_rows_rule *rule, float *row, const float *gradient, float factor, uint32_t dim) {
    static void (*const rules[MH_NUM_ROW_RULES])(const struct mh_rows_rule *, float *, const float *, float, uint32_t) = {
        sgd, adagrad, mean_adagrad, adam, ftrl};
    rules[rule->optimizer](rule, row, gradient, factor, dim);
}
