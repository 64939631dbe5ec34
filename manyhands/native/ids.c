/* Makes ids unique and sorts them by part, and sums the gradients of equal ids. */
#include "core.h"
#include "rows.h"

#include <stdlib.h>
#include <string.h>

#define AHEAD 16

/* The unique ids in the order of their first appearance; `places` is a zeroed hash table of `mask` + 1 slots. */
static size_t collect(const int64_t *ids, size_t count, int64_t *different, int64_t *inverse, uint32_t *places,
                      size_t mask) {
    size_t num = 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(&places[mh_mix((uint64_t)ids[i + AHEAD]) & mask], 1);
        size_t slot = mh_mix((uint64_t)ids[i]) & mask;
        while (places[slot] && different[places[slot] - 1] != ids[i]) slot = (slot + 1) & mask;
        if (!places[slot]) {
            different[num++] = ids[i];
            places[slot] = (uint32_t)num;
        }
        inverse[i] = (int64_t)places[slot] - 1;
    }
    return num;
}

int mh_part_bounds(const int64_t *ids, size_t count, int64_t bounds[MH_ROW_PARTS + 1]) {
    int in_order = 1;
    uint64_t last = 0;
    for (size_t part = 0; part <= MH_ROW_PARTS; part++) bounds[part] = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t part = mh_part_of(ids[i]);
        bounds[part + 1]++;
        in_order &= part >= last;
        last = part;
    }
    for (size_t part = 0; part < MH_ROW_PARTS; part++) bounds[part + 1] += bounds[part];
    return in_order;
}

int64_t mh_unique(const int64_t *ids, size_t count, int64_t *different, int64_t *inverse) {
    unsigned bits = 4;
    while (((size_t)1 << bits) < 2 * count) bits++;
    size_t mask = ((size_t)1 << bits) - 1;
    if (count >= UINT32_MAX) return -1;
    uint32_t *places = calloc(mask + 1, sizeof *places);
    int64_t *first = malloc((count + 1) * sizeof *first), bounds[MH_ROW_PARTS + 1];
    if (places == NULL || first == NULL) {
        free(places), free(first);
        return -1;
    }
    size_t num = collect(ids, count, first, inverse, places, mask);
    mh_part_bounds(first, num, bounds);
    for (size_t i = 0; i < num; i++) {
        int64_t at = bounds[mh_part_of(first[i])]++;
        different[at] = first[i];
        places[i] = (uint32_t)at; /* from here on: the position of each unique id in `different` */
    }
    for (size_t i = 0; i < count; i++) inverse[i] = places[inverse[i]];
    free(places), free(first);
    return (int64_t)num;
}

void mh_first_places(const int64_t *inverse, size_t count, int64_t *first) {
    for (size_t i = count; i-- > 0;) first[inverse[i]] = (int64_t)i;
}

void mh_repeat_rows(float *rows, const int64_t *inverse, const int64_t *first, size_t count, size_t dim) {
    for (size_t i = 0; i < count; i++) {
        size_t from = (size_t)first[inverse[i]];
        if (from != i) memcpy(rows + i * dim, rows + from * dim, dim * sizeof *rows);
    }
}

MH_FOR_THIS_CPU void mh_add_rows(float *to, const float *values, const int64_t *inverse, size_t count, size_t dim) {
    for (size_t i = 0; i < count; i++) {
        float *row = to + (size_t)inverse[i] * dim;
        const float *value = values + i * dim;
        for (size_t j = 0; j < dim; j++) row[j] += value[j];
    }
}
