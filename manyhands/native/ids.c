/* Ids made unique, and gradients summed over those that are the same. */
#include "core.h"
#include "rows.h"

#include <stdlib.h>

#define AHEAD 16

struct seen {
    int64_t id;
    uint64_t place; /* from 1; 0: nobody */
};

int64_t mh_unique(const int64_t *ids, size_t count, int64_t *different, int64_t *inverse) {
    unsigned bits = 4;
    while (((size_t)1 << bits) < 2 * count) bits++;
    size_t mask = ((size_t)1 << bits) - 1;
    struct seen *table = calloc(mask + 1, sizeof *table);
    if (table == NULL) return -1;
    int64_t num = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(&table[mh_mix((uint64_t)ids[i + AHEAD]) & mask]);
        size_t slot = mh_mix((uint64_t)ids[i]) & mask;
        while (table[slot].place && table[slot].id != ids[i]) slot = (slot + 1) & mask;
        if (!table[slot].place) {
            different[num++] = ids[i];
            table[slot] = (struct seen){ids[i], (uint64_t)num};
        }
        inverse[i] = (int64_t)table[slot].place - 1;
    }
    free(table);
    return num;
}

MH_FOR_THIS_CPU void mh_add_rows(float *to, const float *values, const int64_t *inverse, size_t count, size_t dim) {
    for (size_t i = 0; i < count; i++) {
        float *row = to + (size_t)inverse[i] * dim;
        const float *value = values + i * dim;
        for (size_t j = 0; j < dim; j++) row[j] += value[j];
    }
}
