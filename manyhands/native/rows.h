/* Rows of embeddings: a table from 64-bit ids to rows of fp32, in one stretch of memory that somebody else owns and that
 * may outlive the process. `rows.c` finds and changes rows, `row_past.c` finds them as they were, `sweep.c` lets old ones go, `row_rules.c` has the optimizers and
 * what a row starts with, `ids.c` makes ids unique. One process at a time changes a table; others may peek. Start reading at
 * mh_rows_update. */
#ifndef MANYHANDS_ROWS_H
#define MANYHANDS_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* What calls return besides 0: memory is too small, and the table has to move to a larger one; an id is there twice; somebody
 * else changes rows at this moment; the table is not there any more. */
enum { MH_ROWS_NO_ROOM = 4, MH_ROWS_TWICE = 5, MH_ROWS_OLD_NUMBER = 6, MH_ROWS_CHANGING = 7, MH_ROWS_GONE = 8 };

/* How many of what there is room for. A row has `dim` weights and `num_states` numbers of its optimizer. */
struct mh_rows_room {
    uint32_t dim, num_states;
    uint64_t rows, candidates, touched; /* `touched`: by one update, which is what the journal has room for */
};

enum { MH_ROW_SGD, MH_ROW_ADAGRAD, MH_ROW_MEAN_ADAGRAD, MH_ROW_ADAM, MH_ROW_FTRL, MH_NUM_ROW_RULES };
enum { MH_ROW_ZEROS, MH_ROW_UNIFORM, MH_ROW_NORMAL, MH_NUM_ROW_STARTS };

/* How a row starts, how a gradient changes it, and which rows stay. The same in every call for one table. */
struct mh_rows_rule {
    int32_t optimizer, start;
    uint64_t key; /* of the table: what a row starts with is a function of this and its id */
    float scale;  /* of the start: half the width of a uniform one, the deviation of a normal one */
    float lr, eps, accumulator, beta1, beta2, l1, l2, beta, power, shrinkage;
    int32_t z_from_weight; /* FTRL: z starts so that it gives the first weight; else at 0 */
    uint32_t admit_after;  /* sightings that a row is made at */
    uint32_t keep_updates; /* 0: for ever */
};

/* A view of a table's memory. Not in that memory itself. */
struct mh_rows;

size_t mh_rows_bytes(const struct mh_rows_room *room);

/* All zero, and at least mh_rows_bytes long: a table without rows. */
void mh_rows_format(void *memory, const struct mh_rows_room *room);

/* What the memory has room for; not 0 if there is no table in it, or one that is longer than `bytes`. */
int mh_rows_read_room(const void *memory, size_t bytes, struct mh_rows_room *room);

struct mh_rows_count {
    uint64_t number, rows, candidates;
};

/* `number` of the last update that counts, and how many rows and candidates there are. */
void mh_rows_count(const void *memory, struct mh_rows_count *count);

/* Undo the update that a process was killed in, if any; 1 if there was one. To be called before anything else. */
int mh_rows_recover(void *memory);

/* Changes nothing: an id without a row gets what its row would start with. If the last update is beyond `at_most`, rows are
 * as they were before it; no further back. 0 or MH_NO_MEMORY. */
#define MH_ROWS_NEWEST UINT64_MAX
int mh_rows_lookup(const void *memory, const struct mh_rows_rule *rule, const int64_t *ids, size_t count, float *to,
                   uint64_t at_most);

/* The same in a table that another process may change, move or give back meanwhile. `room` is what mh_rows_read_room said when
 * it was opened. 0: all rows are as they were at one moment, between two updates. Else nothing in `to` counts:
 * MH_ROWS_CHANGING, and it can be tried again; MH_ROWS_GONE; or MH_NO_MEMORY. With `places`, each row goes to the one of `to`
 * that they say. */
int mh_rows_peek(const void *memory, const struct mh_rows_room *room, const struct mh_rows_rule *rule, const int64_t *ids,
                 size_t count, float *to, const int64_t *places, uint64_t at_most);

/* Of `count` different ids the gradients, each multiplied by `factor`. Either all of it counts, from the moment that the
 * table's number is `number`, or nothing does. Numbers ascend. With `may_evict`, rows and candidates that were not touched for
 * longest make room for new ones; else there may be none for them, and `wanted` says how many rows and candidates there
 * would have to be room for. */
int mh_rows_update(void *memory, const struct mh_rows_rule *rule, uint64_t number, const int64_t *ids,
                   const float *gradients, size_t count, float factor, int may_evict, struct mh_rows_room *wanted);

/* Everything in a table into an empty one with as much room, or more. */
void mh_rows_move(const void *from, void *to);

/* All ids in no particular order, with their row's number, or MH_ROW_CANDIDATE and how often they were seen; and which update
 * was the last to touch them. */
#define MH_ROW_CANDIDATE 0x80000000u
void mh_rows_list(const void *memory, int64_t *ids, uint32_t *places, uint32_t *updates);

/* The reverse, into an empty table: those that are no candidates get rows 0, 1, 2, ... in this order, whose contents the
 * caller writes. */
void mh_rows_fill(void *memory, uint64_t number, const int64_t *ids, const uint32_t *places, const uint32_t *updates,
                  size_t count);

/* What rows and candidates hold, in one number that does not depend on where they lie: of one in `turns` ids, by turn. */
uint64_t mh_rows_digest(const void *memory, uint64_t turn, uint64_t turns);

/* Where rows begin, in bytes, and from one to the next, in floats. */
size_t mh_rows_offset(const void *memory);
size_t mh_rows_stride(uint32_t dim, uint32_t num_states);

/* One row of each: row_rules.c. */
uint32_t mh_row_states(int optimizer, uint32_t dim);
void mh_row_start(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim);
void mh_row_weights(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim);
void mh_row_change(const struct mh_rows_rule *rule, float *row, const float *gradient, float factor, uint32_t dim);

/* Every id belongs to one of so many parts of its table, the same wherever it is asked for. */
#define MH_ROW_PARTS 16
static inline uint64_t mh_part_of(int64_t id) { return ((uint64_t)id * 0x9e3779b97f4a7c15u) >> 60; }

/* Where each part's begin, if `ids` are in the order of parts, which is what it returns; behind the last, the end. */
int mh_part_bounds(const int64_t *ids, size_t count, int64_t bounds[MH_ROW_PARTS + 1]);

/* The different ones of `ids` in the order of their parts, and in a part in that of their first appearance; and for each of
 * `ids` the place of its own. Returns how many there are, or -1 without memory. */
int64_t mh_unique(const int64_t *ids, size_t count, int64_t *different, int64_t *inverse);

/* Of each different id, where it appears first: from what mh_unique has told. */
void mh_first_places(const int64_t *inverse, size_t count, int64_t *first);

/* Rows that are where their id appears first, to wherever else it does. */
void mh_repeat_rows(float *rows, const int64_t *inverse, const int64_t *first, size_t count, size_t dim);

/* Every row of `values` added to the row `inverse` says, in order. */
void mh_add_rows(float *to, const float *values, const int64_t *inverse, size_t count, size_t dim);

static inline uint64_t mh_mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#endif
