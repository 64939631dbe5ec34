/* Memory layout of a table of rows; for rows.c, row_past.c and sweep.c. In this order, each part aligned to a cache
 * line: the head, two indexes, the list of free rows, the rows, the journal.
 *
 * One of two states is current, and a single store commits the other. An update changes the current index, and records
 * in the journal what it is about to change; a sweep builds the other index, which the same store commits. A killed
 * process has done its stores up to some instruction and none after it: it is enough that the compiler keeps their
 * order.
 *
 * Other processes may look up rows meanwhile. `changes` is their sequence lock: it shows whether all that they have
 * read is from one moment. */
#ifndef MANYHANDS_ROW_TABLE_H
#define MANYHANDS_ROW_TABLE_H

#include "rows.h"

#include <stdatomic.h>

struct entry {
    int64_t id;
    uint32_t place; /* 0: empty; a row's number + 1; or MH_ROW_CANDIDATE | how often it was seen */
    uint32_t update; /* the last update that touched it */
};

struct state {
    uint64_t number, rows, candidates;
    uint64_t free;  /* length of the list of free rows */
    uint64_t fresh; /* rows from this one on were never used */
    uint64_t index; /* which of the two indexes */
};

struct head {
    uint64_t magic;
    struct mh_rows_room room;
    uint64_t current;
    struct state states[2];
    uint64_t journal_number, journal_length;
    _Atomic uint64_t changes; /* odd: a process is changing rows, or was killed while it did; never 0 in a table */
};

/* An entry before the update `journal_number`; in the journal, the row's contents follow it. */
struct record {
    uint64_t slot; /* of the index, or NOWHERE */
    struct entry entry;
    uint64_t row; /* or NOWHERE */
};

#define NOWHERE UINT64_MAX

struct table {
    struct head *head;
    struct entry *indexes[2], *index; /* `index` is the one in use */
    uint32_t *free;
    float *rows;
    unsigned char *journal;
    uint32_t dim;
    size_t num_rows, num_slots, stride, record_bytes, bytes; /* `num_rows`: the capacity */
    struct state state; /* as it will be after the commit */
};

/* Where an id was found, or NOWHERE. */
struct spot {
    uint64_t slot, row;
};

static inline void in_order(void) { atomic_signal_fence(memory_order_seq_cst); }

/* Where looked-up rows are written: in order, or row `places[i]` for the i-th. */
struct target {
    float *to;
    const int64_t *places; /* NULL: in order */
};

static inline float *place_of(const struct target *target, size_t number, uint32_t dim) {
    return target->to + (target->places ? (size_t)target->places[number] : number) * dim;
}

static inline float *row_at(const struct table *t, uint64_t row) { return t->rows + row * t->stride; }

static inline int has_row(const struct entry *entry) { return entry->place && !(entry->place & MH_ROW_CANDIDATE); }

static inline size_t home_of(const struct table *t, int64_t id) {
    return (size_t)(((unsigned __int128)mh_mix((uint64_t)id) * t->num_slots) >> 64);
}

/* The slot of the id, or the empty slot where it would be. If another process changes the index meanwhile, any slot. */
static inline size_t slot_from(const struct table *t, int64_t id, size_t slot) {
    for (size_t left = t->num_slots; left && t->index[slot].place && t->index[slot].id != id; left--) {
        slot = slot + 1 == t->num_slots ? 0 : slot + 1;
    }
    return slot;
}

static inline size_t slot_of(const struct table *t, int64_t id) { return slot_from(t, id, home_of(t, id)); }

/* What an update will add to the table. */
struct need {
    uint64_t rows, candidates, admitted; /* `admitted`: how many of the rows are candidates now */
};

/* Evict entries that are too old and, with `may_evict`, the least recently touched ones if there is no room for `need`.
 * Entries at `spots` stay. 0, MH_ROWS_NO_ROOM or MH_NO_MEMORY; `swept`: the other index is in use now. */
int mh_rows_sweep(struct table *t, const struct mh_rows_rule *rule, uint64_t number, const struct spot *spots, size_t count,
                  const struct need *need, int may_evict, int *swept);

/* Whether the last update is later than `at_most`, and its journal is still there. */
int mh_rows_has_past(const struct table *t, uint64_t at_most);

/* Look up rows as they were before that update. 0 or MH_NO_MEMORY. */
int mh_rows_look_back(const struct table *t, const struct mh_rows_room *room, const struct mh_rows_rule *rule,
                      const int64_t *ids, size_t count, const struct target *target);

#endif
