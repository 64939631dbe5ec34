/* Embedding rows: a table from 64-bit ids to rows of fp32, in one block of memory that the caller owns and that may
 * outlive the process. `rows.c` finds and updates rows, `row_past.c` finds them as they were before the last update,
 * `sweep.c` evicts old ones, `row_rules.c` has the optimizers and initial values, `ids.c` makes ids unique. One process
 * at a time changes a table; others may peek. Start reading at mh_rows_update. */
#ifndef MANYHANDS_ROWS_H
#define MANYHANDS_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* What calls return besides 0: the memory is too small, and the table has to move to a larger one; an id occurs twice;
 * the update's number is not above the last one's; another process is changing rows; the table does not exist any
 * more. */
enum { MH_ROWS_NO_ROOM = 4, MH_ROWS_TWICE = 5, MH_ROWS_OLD_NUMBER = 6, MH_ROWS_CHANGING = 7, MH_ROWS_GONE = 8 };

/* Capacities. A row has `dim` weights and `num_states` numbers of optimizer state. */
struct mh_rows_room {
    uint32_t dim, num_states;
    uint64_t rows, candidates, touched; /* `touched`: entries that one update may touch: the journal's capacity */
};

enum { MH_ROW_SGD, MH_ROW_ADAGRAD, MH_ROW_MEAN_ADAGRAD, MH_ROW_ADAM, MH_ROW_FTRL, MH_NUM_ROW_RULES };
enum { MH_ROW_ZEROS, MH_ROW_UNIFORM, MH_ROW_NORMAL, MH_NUM_ROW_STARTS };

/* Initial values, optimizer, and which rows are admitted and kept. The same in every call for one table. */
struct mh_rows_rule {
    int32_t optimizer, start;
    uint64_t key; /* of the table: a row's initial values are a function of this and its id */
    float scale;  /* of initial values: half the width if uniform, the standard deviation if normal */
    float lr, eps, accumulator, beta1, beta2, l1, l2, beta, power, shrinkage;
    int32_t z_from_weight; /* FTRL: z starts so that it yields the initial weight; else at 0 */
    uint32_t admit_after;  /* the number of sightings at which an id gets a row */
    uint32_t keep_updates; /* a row that was not touched for more updates is evicted; 0: never */
};

/* A view of a table's memory. Not in that memory itself. */
struct mh_rows;

size_t mh_rows_bytes(const struct mh_rows_room *room);

/* Make an empty table of memory that is all zero and at least mh_rows_bytes long. */
void mh_rows_format(void *memory, const struct mh_rows_room *room);

/* The table's capacities; returns not 0 if there is no table in the memory, or one that is longer than `bytes`. */
int mh_rows_read_room(const void *memory, size_t bytes, struct mh_rows_room *room);

struct mh_rows_count {
    uint64_t number, rows, candidates;
};

/* The `number` of the last committed update, and the numbers of rows and candidates. */
void mh_rows_count(const void *memory, struct mh_rows_count *count);

/* Undo an update in which a process was killed; 1 if there was one. Call it before anything else. */
int mh_rows_recover(void *memory);

/* Changes nothing: an id without a row gets the initial values of its row. If the last update is later than `at_most`,
 * rows are as they were before it; no further back. 0 or MH_NO_MEMORY. */
#define MH_ROWS_NEWEST UINT64_MAX
int mh_rows_lookup(const void *memory, const struct mh_rows_rule *rule, const int64_t *ids, size_t count, float *to,
                   uint64_t at_most);

/* The same in a table that another process may change, move or free meanwhile. `room` is what mh_rows_read_room
 * returned when it was opened. 0: all rows are from one moment, between two updates. Else `to` is invalid:
 * MH_ROWS_CHANGING (try again), MH_ROWS_GONE or MH_NO_MEMORY. With `places`, the i-th row is written to row `places[i]`
 * of `to`. */
int mh_rows_peek(const void *memory, const struct mh_rows_room *room, const struct mh_rows_rule *rule, const int64_t *ids,
                 size_t count, float *to, const int64_t *places, uint64_t at_most);

/* Apply the gradients of `count` different ids, each multiplied by `factor`. The update is atomic: all of it is applied
 * once the table's number is `number`, or nothing is. Numbers ascend. With `may_evict`, the least recently touched rows
 * and candidates are evicted for new ones; else there may be no room, and `wanted` has the capacities that would be
 * needed. */
int mh_rows_update(void *memory, const struct mh_rows_rule *rule, uint64_t number, const int64_t *ids,
                   const float *gradients, size_t count, float factor, int may_evict, struct mh_rows_room *wanted);

/* Copy a table into an empty one with at least its capacities. */
void mh_rows_move(const void *from, void *to);

/* All ids in no particular order, each with its row's number, or MH_ROW_CANDIDATE | how often it was seen; and the last
 * update that touched it. */
#define MH_ROW_CANDIDATE 0x80000000u
void mh_rows_list(const void *memory, int64_t *ids, uint32_t *places, uint32_t *updates);

/* The reverse, into an empty table: ids that are not candidates get rows 0, 1, 2, ... in this order, and the caller
 * writes their contents. */
void mh_rows_fill(void *memory, uint64_t number, const int64_t *ids, const uint32_t *places, const uint32_t *updates,
                  size_t count);

/* A digest of rows and candidates that does not depend on their positions: of one in `turns` ids, chosen by `turn`. */
uint64_t mh_rows_digest(const void *memory, uint64_t turn, uint64_t turns);

/* The offset of the first row in bytes, and the distance between rows in floats. */
size_t mh_rows_offset(const void *memory);
size_t mh_rows_stride(uint32_t dim, uint32_t num_states);

/* For single rows: row_rules.c. */
uint32_t mh_row_states(int optimizer, uint32_t dim);
void mh_row_start(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim);
void mh_row_weights(const struct mh_rows_rule *rule, int64_t id, float *row, uint32_t dim);
void mh_row_change(const struct mh_rows_rule *rule, float *row, const float *gradient, float factor, uint32_t dim);

/* Every id belongs to one of this many parts of its table, the same in every process. */
#define MH_ROW_PARTS 16
static inline uint64_t mh_part_of(int64_t id) { return ((uint64_t)id * 0x9e3779b97f4a7c15u) >> 60; }

/* Returns whether `ids` are in the order of parts; `bounds` then has the start of each part, and the end. */
int mh_part_bounds(const int64_t *ids, size_t count, int64_t bounds[MH_ROW_PARTS + 1]);

/* The unique ids in the order of their parts, and within a part of their first appearance; `inverse` has the index of
 * each of `ids` in `different`. Returns the number of unique ids, or -1 if there is no memory. */
int64_t mh_unique(const int64_t *ids, size_t count, int64_t *different, int64_t *inverse);

/* The first index of each unique id, from mh_unique's `inverse`. */
void mh_first_places(const int64_t *inverse, size_t count, int64_t *first);

/* Copy each row from the first index of its id to all other indices of that id. */
void mh_repeat_rows(float *rows, const int64_t *inverse, const int64_t *first, size_t count, size_t dim);

/* Add each row of `values` to row `inverse[i]` of `to`, in order. */
void mh_add_rows(float *to, const float *values, const int64_t *inverse, size_t count, size_t dim);

static inline uint64_t mh_mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#endif
