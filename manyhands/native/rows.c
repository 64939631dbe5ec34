/* Finding and updating rows; rows.h documents the interface and row_table.h the layout. */
#include "rows.h"
#include "core.h"
#include "row_table.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x3273776f72686dULL /* "mhrows2" */
#define LINE 64
/* Memory is prefetched this many ids before its use: a cache miss takes as long as the work on several ids, and a core
 * can have a dozen or two in flight. */
#define AHEAD 16

static size_t lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

size_t mh_rows_stride(uint32_t dim, uint32_t num_states) { return ((size_t)dim + num_states + 3) / 4 * 4; }

static struct table view(const void *memory, const struct mh_rows_room *room) {
    unsigned char *at = (unsigned char *)memory;
    struct table t = {.head = (struct head *)at, .stride = mh_rows_stride(room->dim, room->num_states)};
    t.dim = room->dim;
    t.num_rows = room->rows;
    t.num_slots = (room->rows + room->candidates) * 3 / 2 + 16; /* never more than two thirds full */
    t.record_bytes = sizeof(struct record) + t.stride * sizeof(float);
    at += lines(sizeof(struct head));
    for (int i = 0; i < 2; i++) {
        t.indexes[i] = (struct entry *)at;
        at += lines(t.num_slots * sizeof(struct entry));
    }
    t.free = (uint32_t *)at;
    at += lines(room->rows * sizeof(uint32_t));
    t.rows = (float *)at;
    at += lines(room->rows * t.stride * sizeof(float));
    t.journal = at;
    at += room->touched * t.record_bytes;
    t.bytes = (size_t)(at - (unsigned char *)memory);
    return t;
}

static struct table open_table(const void *memory) {
    struct table t = view(memory, &((const struct head *)memory)->room);
    t.state = t.head->states[t.head->current];
    t.index = t.indexes[t.state.index];
    return t;
}

size_t mh_rows_bytes(const struct mh_rows_room *room) { return view(NULL, room).bytes; }

size_t mh_rows_offset(const void *memory) {
    return (size_t)((unsigned char *)open_table(memory).rows - (unsigned char *)memory);
}

void mh_rows_format(void *memory, const struct mh_rows_room *room) {
    struct head *head = memory;
    head->room = *room;
    head->changes = 2;
    in_order();
    head->magic = MAGIC;
}

int mh_rows_read_room(const void *memory, size_t bytes, struct mh_rows_room *room) {
    const struct head *head = memory;
    if (bytes < sizeof *head || head->magic != MAGIC) return MH_BAD_ARGUMENT;
    *room = head->room;
    return mh_rows_bytes(room) > bytes ? MH_BAD_ARGUMENT : 0;
}

void mh_rows_count(const void *memory, struct mh_rows_count *count) {
    struct table t = open_table(memory);
    *count = (struct mh_rows_count){t.state.number, t.state.rows, t.state.candidates};
}

/* ---- the journal ---- */

static void begin_journal(struct table *t, uint64_t number) {
    t->head->journal_length = 0;
    in_order();
    t->head->journal_number = number;
    in_order();
}

/* Called before the entry, or the row, is changed. */
static void remember(struct table *t, uint64_t slot, const struct entry *entry, uint64_t row) {
    unsigned char *at = t->journal + t->head->journal_length * t->record_bytes;
    struct record record = {slot, *entry, row};
    memcpy(at, &record, sizeof record);
    if (row != NOWHERE) memcpy(at + sizeof record, row_at(t, row), t->stride * sizeof(float));
    in_order();
    t->head->journal_length++;
    in_order();
}

/* ---- the sequence lock for readers ---- */

static void begin_changes(struct head *head) {
    atomic_store_explicit(&head->changes, head->changes | 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

static void end_changes(struct head *head) {
    atomic_store_explicit(&head->changes, (head->changes | 1) + 1, memory_order_release);
}

static int undo(const struct table *t) {
    if (t->head->journal_number <= t->state.number || t->head->journal_length == 0) return 0;
    for (uint64_t i = t->head->journal_length; i-- > 0;) {
        const unsigned char *at = t->journal + i * t->record_bytes;
        struct record record;
        memcpy(&record, at, sizeof record);
        if (record.row != NOWHERE) memcpy(row_at(t, record.row), at + sizeof record, t->stride * sizeof(float));
        if (record.slot != NOWHERE) t->index[record.slot] = record.entry;
    }
    in_order();
    t->head->journal_length = 0;
    return 1;
}

int mh_rows_recover(void *memory) {
    struct table t = open_table(memory);
    int undone = undo(&t);
    if (t.head->changes & 1) end_changes(t.head);
    return undone;
}

static void commit(struct table *t, uint64_t number) {
    uint64_t other = t->head->current ^ 1;
    t->state.number = number;
    t->head->states[other] = t->state;
    in_order();
    t->head->current = other;
    in_order();
}

/* ---- finding ---- */

/* Prefetch the entry, and return the id's first slot. */
static inline size_t ask_for_entry(const struct table *t, int64_t id) {
    size_t home = home_of(t, id);
    __builtin_prefetch(&t->index[home]);
    return home;
}

/* Prefetch for reading only: another process may be about to change it. */
static inline void ask_for_row(const struct table *t, uint64_t row, size_t floats) {
    if (row == NOWHERE) return;
    for (size_t j = 0; j < floats; j += LINE / sizeof(float)) __builtin_prefetch(row_at(t, row) + j);
}

static inline void ask_to_change(const struct table *t, const struct spot *spot) {
    if (spot->slot != NOWHERE) __builtin_prefetch(&t->index[spot->slot], 1);
    if (spot->row == NOWHERE) return;
    for (size_t j = 0; j < t->stride; j += LINE / sizeof(float)) __builtin_prefetch(row_at(t, spot->row) + j, 1);
}

static inline struct spot spot_from(const struct table *t, int64_t id, size_t home) {
    size_t slot = slot_from(t, id, home);
    struct entry entry = t->index[slot];
    uint64_t row = has_row(&entry) && entry.place <= t->num_rows ? entry.place - 1 : NOWHERE;
    return (struct spot){entry.place ? slot : NOWHERE, row};
}

static void find(const struct table *t, const int64_t *ids, size_t count, struct spot *spots) {
    size_t homes[AHEAD];
    for (size_t i = 0; i < count + AHEAD; i++) {
        if (i >= AHEAD) spots[i - AHEAD] = spot_from(t, ids[i - AHEAD], homes[i % AHEAD]);
        if (i < count) homes[i % AHEAD] = ask_for_entry(t, ids[i]);
    }
}

/* Rows of a common length are copied inline. */
static inline void copy_weights(float *to, const float *row, uint32_t dim) {
    if (dim == 16) memcpy(to, row, 16 * sizeof *to);
    else memcpy(to, row, dim * sizeof *to);
}

/* A pipeline: entries are read AHEAD ids after their prefetch, and rows copied AHEAD ids after that. */
static void look_up(const struct table *t, const struct mh_rows_rule *rule, const int64_t *ids, size_t count,
                    const struct target *target) {
    uint32_t dim = t->dim;
    size_t homes[AHEAD];
    uint64_t rows[AHEAD];
    for (size_t i = 0; i < count + 2 * AHEAD; i++) {
        size_t at = i % AHEAD; /* the value from AHEAD ids ago is used before it is overwritten */
        if (i >= 2 * AHEAD) {
            float *to = place_of(target, i - 2 * AHEAD, dim);
            if (rows[at] != NOWHERE) copy_weights(to, row_at(t, rows[at]), dim);
            else mh_row_weights(rule, ids[i - 2 * AHEAD], to, dim);
        }
        if (i >= AHEAD && i < count + AHEAD) {
            rows[at] = spot_from(t, ids[i - AHEAD], homes[at]).row;
            ask_for_row(t, rows[at], dim);
            __builtin_prefetch(place_of(target, i - AHEAD, dim), 1);
        }
        if (i < count) homes[at] = ask_for_entry(t, ids[i]);
    }
}

int mh_rows_lookup(const void *memory, const struct mh_rows_rule *rule, const int64_t *ids, size_t count, float *to,
                   uint64_t at_most) {
    struct table t = open_table(memory);
    struct target target = {to, NULL};
    if (mh_rows_has_past(&t, at_most)) return mh_rows_look_back(&t, &t.head->room, rule, ids, count, &target);
    look_up(&t, rule, ids, count, &target);
    return 0;
}

int mh_rows_peek(const void *memory, const struct mh_rows_room *room, const struct mh_rows_rule *rule, const int64_t *ids,
                 size_t count, float *to, const int64_t *places, uint64_t at_most) {
    struct table t = view(memory, room); /* not from the memory's head, which may be freed while it is read */
    struct target target = {to, places};
    uint64_t before = atomic_load_explicit(&t.head->changes, memory_order_acquire);
    if (t.head->magic != MAGIC) return MH_ROWS_GONE;
    if (before & 1) return MH_ROWS_CHANGING;
    t.index = t.indexes[t.head->states[t.head->current & 1].index & 1];
    int failed = 0;
    if (mh_rows_has_past(&t, at_most)) failed = mh_rows_look_back(&t, room, rule, ids, count, &target);
    else look_up(&t, rule, ids, count, &target);
    if (failed) return failed;
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&t.head->changes, memory_order_relaxed) == before ? 0 : MH_ROWS_CHANGING;
}

/* ---- changing ---- */

static struct need need_of(const struct table *t, const struct mh_rows_rule *rule, const struct spot *spots, size_t count) {
    struct need need = {0};
    for (size_t i = 0; i < count; i++) {
        if (spots[i].row != NOWHERE) continue;
        const struct entry *entry = spots[i].slot == NOWHERE ? NULL : &t->index[spots[i].slot];
        uint32_t seen = entry == NULL ? 0 : entry->place & ~MH_ROW_CANDIDATE;
        int is_admitted = seen + 1 >= rule->admit_after;
        need.rows += is_admitted;
        need.admitted += is_admitted && entry != NULL;
        need.candidates += !is_admitted && entry == NULL;
    }
    return need;
}

static uint64_t take_free_row(struct table *t) {
    t->state.rows++;
    return t->state.free ? t->free[--t->state.free] : t->state.fresh++;
}

struct touch {
    int64_t id;
    const float *gradient;
    float factor;
    uint32_t number;
    int in_journal; /* whether the index in use is the committed one, whose changes need the journal */
};

/* Apply one id's gradient to its row, or to a new row; or only count the id as a candidate. */
static int touch(struct table *t, const struct mh_rows_rule *rule, const struct touch *one, size_t slot) {
    struct entry *entry = &t->index[slot];
    if (entry->place && entry->update == one->number) return MH_ROWS_TWICE;
    uint32_t dim = t->dim, seen = entry->place & ~MH_ROW_CANDIDATE, place = entry->place;
    int known = has_row(entry), is_made = !known && seen + 1 >= rule->admit_after;
    t->state.candidates -= is_made && entry->place;
    t->state.candidates += !known && !is_made && !entry->place;
    if (is_made) place = (uint32_t)take_free_row(t) + 1;
    else if (!known) place = MH_ROW_CANDIDATE | (seen + 1);
    uint64_t row = known || is_made ? place - 1 : NOWHERE;
    if (one->in_journal || row != NOWHERE) remember(t, one->in_journal ? slot : NOWHERE, entry, row);
    if (is_made) mh_row_start(rule, one->id, row_at(t, row), dim);
    if (row != NOWHERE) mh_row_change(rule, row_at(t, row), one->gradient, one->factor, dim);
    *entry = (struct entry){one->id, place, one->number};
    return 0;
}

static int touch_all(struct table *t, const struct mh_rows_rule *rule, struct touch one, const int64_t *ids,
                     const float *gradients, const struct spot *spots, size_t count) {
    for (size_t i = 0; i < count + AHEAD; i++) {
        if (i < count) ask_to_change(t, &spots[i]);
        if (i < AHEAD) continue;
        size_t now = i - AHEAD;
        one.id = ids[now];
        one.gradient = gradients + now * t->dim;
        int failed = touch(t, rule, &one, spots[now].slot == NOWHERE ? slot_of(t, ids[now]) : spots[now].slot);
        if (failed) return failed;
    }
    return 0;
}

int mh_rows_update(void *memory, const struct mh_rows_rule *rule, uint64_t number, const int64_t *ids,
                   const float *gradients, size_t count, float factor, int may_evict, struct mh_rows_room *wanted) {
    struct table t = open_table(memory);
    *wanted = t.head->room;
    if (number <= t.state.number || number > UINT32_MAX) return MH_ROWS_OLD_NUMBER;
    wanted->touched = count;
    if (count > t.head->room.touched) return MH_ROWS_NO_ROOM;
    struct spot *spots = malloc((count + 1) * sizeof *spots);
    if (spots == NULL) return MH_NO_MEMORY;
    find(&t, ids, count, spots);
    struct need need = need_of(&t, rule, spots, count);
    wanted->rows = t.state.rows + need.rows;
    wanted->candidates = t.state.candidates - need.admitted + need.candidates;
    begin_changes(t.head);
    int swept = 0, failed = mh_rows_sweep(&t, rule, number, spots, count, &need, may_evict, &swept);
    if (!failed) {
        if (swept) find(&t, ids, count, spots);
        begin_journal(&t, number);
        struct touch one = {.factor = factor, .number = (uint32_t)number, .in_journal = !swept};
        failed = touch_all(&t, rule, one, ids, gradients, spots, count);
        if (failed) mh_rows_recover(memory);
        else commit(&t, number);
    }
    end_changes(t.head);
    free(spots);
    return failed;
}

/* ---- whole tables ---- */

void mh_rows_move(const void *from, void *to) {
    struct table a = open_table(from), b = open_table(to);
    b.state = a.state;
    b.state.index = 0;
    b.index = b.indexes[0];
    for (size_t slot = 0; slot < a.num_slots; slot++) {
        if (a.index[slot].place) b.index[slot_of(&b, a.index[slot].id)] = a.index[slot];
    }
    memcpy(b.free, a.free, a.state.free * sizeof *a.free);
    memcpy(b.rows, a.rows, a.state.fresh * a.stride * sizeof(float));
    commit(&b, a.state.number);
}

uint64_t mh_rows_digest(const void *memory, uint64_t turn, uint64_t turns) {
    struct table t = open_table(memory);
    uint64_t whole = mh_mix(t.state.number ^ mh_mix(t.state.rows));
    size_t floats = t.head->room.dim + t.head->room.num_states;
    for (size_t slot = 0; slot < t.num_slots; slot++) {
        const struct entry *entry = &t.index[slot];
        if (!entry->place || mh_mix((uint64_t)entry->id) % turns != turn) continue;
        uint64_t one = mh_mix((uint64_t)entry->id ^ mh_mix(entry->update));
        if (has_row(entry)) {
            struct mh_digest digest = {0};
            mh_digest_add(&digest, row_at(&t, entry->place - 1), floats * sizeof(float));
            one ^= mh_digest_end(&digest);
        } else {
            one ^= entry->place;
        }
        whole += mh_mix(one); /* in any order */
    }
    return whole;
}

void mh_rows_list(const void *memory, int64_t *ids, uint32_t *places, uint32_t *updates) {
    struct table t = open_table(memory);
    size_t found = 0;
    for (size_t slot = 0; slot < t.num_slots; slot++) {
        const struct entry *entry = &t.index[slot];
        if (!entry->place) continue;
        ids[found] = entry->id;
        places[found] = has_row(entry) ? entry->place - 1 : entry->place;
        updates[found++] = entry->update;
    }
}

void mh_rows_fill(void *memory, uint64_t number, const int64_t *ids, const uint32_t *places, const uint32_t *updates,
                  size_t count) {
    struct table t = open_table(memory);
    for (size_t i = 0; i < count; i++) {
        int is_row = !(places[i] & MH_ROW_CANDIDATE);
        uint32_t place = is_row ? (uint32_t)++t.state.fresh : places[i];
        t.index[slot_of(&t, ids[i])] = (struct entry){ids[i], place, updates[i]};
        t.state.rows += (uint64_t)is_row;
        t.state.candidates += (uint64_t)!is_row;
    }
    commit(&t, number);
}
