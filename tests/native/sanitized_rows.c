/* Tables of rows with exactly as much memory as they ask for: every optimizer, rows that go, moves; for sanitized.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rows.h"

#define CHECK(what)                                                      \
    if (!(what)) {                                                       \
        fprintf(stderr, "rows, line %d: not so: %s\n", __LINE__, #what); \
        exit(1);                                                         \
    }

static void *new_table(const struct mh_rows_room *room) {
    void *memory = calloc(1, mh_rows_bytes(room));
    CHECK(memory != NULL);
    mh_rows_format(memory, room);
    return memory;
}

/* Into a larger one that is filled by hand, and back into one that was moved to. */
static void *taken_over(void *memory, struct mh_rows_room *room) {
    struct mh_rows_count count;
    mh_rows_count(memory, &count);
    size_t length = count.rows + count.candidates;
    int64_t *ids = malloc((length + 1) * sizeof *ids);
    uint32_t *places = malloc((length + 1) * 4), *updates = malloc((length + 1) * 4);
    mh_rows_list(memory, ids, places, updates);
    void *filled = new_table(room);
    mh_rows_fill(filled, count.number, ids, places, updates, length);
    free(filled), free(ids), free(places), free(updates);
    room->rows += 3;
    void *moved = new_table(room);
    mh_rows_move(memory, moved);
    CHECK(mh_rows_digest(memory, 1, 2) == mh_rows_digest(moved, 1, 2));
    free(memory);
    return moved;
}

/* What others see: the same rows; nothing of a table that is not there; and no harm from one that is nonsense. */
static void peeked(const void *memory, const struct mh_rows_room *room, const struct mh_rows_rule *rule, const int64_t *ids,
                   size_t count, const float *rows) {
    size_t bytes = mh_rows_bytes(room), wanted = count * room->dim * sizeof(float);
    float *found = malloc(wanted + 1);
    CHECK(mh_rows_peek(memory, room, rule, ids, count, found, NULL, MH_ROWS_NEWEST) == 0 && memcmp(found, rows, wanted) == 0);
    int64_t *places = malloc((count + 1) * sizeof *places);
    for (size_t i = 0; i < count; i++) places[i] = (int64_t)(count - 1 - i);
    CHECK(mh_rows_peek(memory, room, rule, ids, count, found, places, MH_ROWS_NEWEST) == 0);
    for (size_t i = 0; i < count; i++) {
        CHECK(!memcmp(found + (count - 1 - i) * room->dim, rows + i * room->dim, room->dim * sizeof(float)));
    }
    free(places);
    unsigned char *other = calloc(1, bytes);
    CHECK(mh_rows_peek(other, room, rule, ids, count, found, NULL, MH_ROWS_NEWEST) == MH_ROWS_GONE);
    memcpy(other, memory, bytes);
    for (size_t i = 256; i < bytes; i++) other[i] = (unsigned char)mh_mix(i);
    mh_rows_peek(other, room, rule, ids, count, found, NULL, MH_ROWS_NEWEST);
    mh_rows_peek(other, room, rule, ids, count, found, NULL, 0);
    free(found), free(other);
}

static void one_table(int optimizer, uint32_t dim, uint32_t admit_after) {
    struct mh_rows_rule rule = {.optimizer = optimizer, .start = optimizer % MH_NUM_ROW_STARTS, .key = 5, .scale = 1,
        .lr = 0.1f, .eps = 1e-8f, .accumulator = 0.1f, .beta1 = 0.9f, .beta2 = 0.99f, .l1 = 0.1f, .l2 = 0.1f, .beta = 1,
        .power = 0.5f, .z_from_weight = 1, .admit_after = admit_after, .keep_updates = 9};
    struct mh_rows_room room = {dim, mh_row_states(optimizer, dim), 20, admit_after > 1 ? 20 : 0, 15}, wanted;
    void *memory = new_table(&room);
    for (uint64_t number = 1; number < 60; number++) {
        size_t given = number % 16;
        int64_t *ids = malloc((given + 1) * sizeof *ids), *own = malloc((given + 1) * sizeof *ids);
        int64_t *inverse = malloc((given + 1) * sizeof *ids);
        for (size_t i = 0; i < given; i++) ids[i] = (int64_t)mh_mix(number * 31 + i) % 40;
        int64_t count = mh_unique(ids, given, own, inverse);
        CHECK(count >= 0 && (size_t)count <= given);
        float *values = calloc(given * dim + 1, sizeof(float)), *sums = calloc((size_t)count * dim + 1, sizeof(float));
        for (size_t i = 0; i < given * dim; i++) values[i] = (float)i;
        mh_add_rows(sums, values, inverse, given, dim);
        size_t bytes = (size_t)count * dim * sizeof(float);
        float *before = malloc(bytes + 1), *then = malloc(bytes + 1);
        CHECK(mh_rows_lookup(memory, &rule, own, (size_t)count, before, MH_ROWS_NEWEST) == 0);
        CHECK(mh_rows_update(memory, &rule, number, own, sums, (size_t)count, 0.5f, 1, &wanted) == 0);
        CHECK(mh_rows_lookup(memory, &rule, own, (size_t)count, then, number - 1) == 0 && !memcmp(before, then, bytes));
        CHECK(mh_rows_lookup(memory, &rule, own, (size_t)count, sums, MH_ROWS_NEWEST) == 0);
        CHECK(mh_rows_recover(memory) == 0);
        peeked(memory, &room, &rule, own, (size_t)count, sums);
        free(ids), free(own), free(inverse), free(values), free(sums), free(before), free(then);
        if (number % 20 == 0) memory = taken_over(memory, &room);
    }
    free(memory);
}

void all_rows(void) {
    for (int optimizer = 0; optimizer < MH_NUM_ROW_RULES; optimizer++) {
        for (uint32_t dim = 1; dim < 20; dim += 6) one_table(optimizer, dim, 1), one_table(optimizer, dim, 3);
    }
}
