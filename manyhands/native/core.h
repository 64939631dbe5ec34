/* Sums and barriers in memory that the workers of one host share. Neither Python nor torch in here: pointers and
 * lengths in, numbers out. `sum.c` adds along a tree, `plane.c` has barriers and collectives, `update.c` computes new
 * weights from a sum of gradients, `codec.c` compresses fp32, `digest.c` detects whether memory has changed, `copy.c`
 * copies, `pages.c` allocates large pages. Embedding rows have a separate header, rows.h. Start reading at
 * mh_all_reduce. */
#ifndef MANYHANDS_CORE_H
#define MANYHANDS_CORE_H

#include <stddef.h>
#include <stdint.h>

/* Vectorised for the CPU that it runs on, selected by CPU features when the library is loaded; selection by a model's
 * name would cover the CPUs of one vendor only. Vectors of 512 bits add up memory no faster than those of 256.
 * Functions with this mark give the same bits on every CPU. Off with a sanitizer, which is not ready when the selection
 * runs. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define MH_FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define MH_FOR_THIS_CPU
#endif

enum { MH_F32, MH_F64, MH_BF16, MH_F16, MH_I64, MH_NUM_DTYPES };

size_t mh_item_bytes(int dtype); /* 0 for an unknown dtype */

/* A tree of additions as a postfix program: a number pushes that source, MH_ADD replaces the two topmost by their sum.
 * Every addition is rounded to the dtype, so the result depends on the program alone: not on which rank adds, the
 * number of ranks, or where a buffer is cut. */
#define MH_ADD (-1)

/* 0 if the program pushes only sources below `num_sources` and leaves one value. */
int mh_check_program(const int32_t *program, size_t length, size_t num_sources);

/* `target` may be one of the sources. 0, or MH_NO_MEMORY. The program must have been checked. */
int mh_sum(void *target, const void *const *sources, const int32_t *program, size_t length, size_t count, int dtype);

/* At most MH_BLOCK_BYTES of the sum, from `offset` bytes into each source. `scratch` has MH_MAX_DEPTH blocks; `target`
 * is a separate block, not one of the sources. */
#define MH_BLOCK_BYTES 4096
#define MH_MAX_DEPTH 64
void mh_sum_block(void *target, const void *const *sources, size_t offset, const int32_t *program, size_t length,
                  size_t count, int dtype, unsigned char *scratch);

/* What a call on a plane returns besides 0; MH_MISSING + rank if that rank did not arrive. */
enum { MH_ABORTED = 1, MH_BAD_ARGUMENT = 2, MH_NO_MEMORY = 3, MH_UNLIKE = 4, MH_MISSING = 16 };

/* Why a rank enters a barrier: ranks with different purposes have called different collectives. */
#define MH_PURPOSE_BYTES 60
struct mh_purpose {
    uint32_t length;
    char text[MH_PURPOSE_BYTES]; /* truncated, or filled up with zeros */
};

/* One rank's view of the shared memory. Not shared itself. */
struct mh_plane {
    unsigned char *base;
    uint32_t rank, world;
    size_t area_bytes;
    uint32_t barriers, turns;
    struct mh_purpose purpose;
};

size_t mh_plane_bytes(uint32_t world, size_t area_bytes);

/* A plane starts from zeros, which new shared memory contains: nothing has to be initialised. */
int mh_plane_open(struct mh_plane *plane, void *base, size_t bytes, uint32_t rank, uint32_t world, size_t area_bytes);

/* Every rank that waits on the plane, now or later, gets MH_ABORTED. Any process that maps the memory may call it;
 * `rank` is the rank at fault. mh_lost_rank returns the rank of the first such call, or -1. */
void mh_abort(void *base, uint32_t world, uint32_t rank);
int64_t mh_lost_rank(const void *base);

/* Why this rank makes the calls that follow. */
void mh_set_purpose(struct mh_plane *plane, const char *text, size_t length);
/* The purpose of `rank` at the last barrier. */
const struct mh_purpose *mh_purpose_of(const struct mh_plane *plane, uint32_t rank);

/* All ranks make the calls below in the same order with the same sizes. Each returns within `timeout_ns` per barrier: a
 * rank whose wait times out aborts the plane, so that no other rank waits any longer. If the ranks' purposes differ,
 * all ranks get MH_UNLIKE. */
int mh_meet(struct mh_plane *plane, int64_t timeout_ns);

/* Progress counters without a barrier: a rank that sees `number`, or a later one, also sees all that the posting rank
 * wrote to shared memory before. A rank's numbers ascend, and wrap after 2^32. mh_post returns at once, mh_all_posted
 * returns whether every rank has posted `number`, and mh_wait_posted waits for that, with a timeout as in a barrier. */
void mh_post(struct mh_plane *plane, uint32_t number);
int mh_all_posted(const struct mh_plane *plane, uint32_t number);
int mh_wait_posted(struct mh_plane *plane, uint32_t number, int64_t timeout_ns);

int mh_all_reduce(struct mh_plane *plane, void *data, size_t count, int dtype, const int32_t *program, size_t length,
                  int64_t timeout_ns);
/* `input` has `world` parts of `count` elements; `output` gets the sum of this rank's part. */
int mh_reduce_scatter(struct mh_plane *plane, void *output, const void *input, size_t count, int dtype,
                      const int32_t *program, size_t length, int64_t timeout_ns);
int mh_all_gather(struct mh_plane *plane, void *output, const void *input, size_t bytes, int64_t timeout_ns);
int mh_broadcast(struct mh_plane *plane, void *data, size_t bytes, uint32_t source, int64_t timeout_ns);

/* An optimizer's settings of one step on fp32 weights; the caller has done what torch computes in double precision.
 * Names are the roles of the numbers in update.c; not every optimizer uses all of them. */
enum { MH_SGD, MH_ADAM, MH_ADAGRAD, MH_RMSPROP, MH_NUM_OPTIMIZERS };

struct mh_update {
    int32_t optimizer, first, nesterov, maximize, extra; /* `first`: no momentum yet; `extra`: has a third state */
    float factor, clip;                                  /* the gradient is multiplied by both, one after the other */
    float step_size;                                     /* the learning rate with its sign and bias correction */
    float weight_decay, shrink;                          /* added to the gradient; multiplies the weights */
    float momentum, gradient_share, second_keep, second_share;
    float root_divisor, eps;
};

#define MH_MAX_STATES 3

/* A range of weights with its optimizer state. Old values are read from `w` and `from`, new ones written to `to` and
 * `state`: the same memory, or another copy, which leaves the old one unchanged. */
struct mh_piece {
    uint64_t count;
    const float *w;
    float *to;
    const float *from[MH_MAX_STATES];
    float *state[MH_MAX_STATES];
};

/* A 64-bit digest of memory. Start with zeros; the digest is over all added pieces in order. Each piece counts in whole
 * rows of lanes: a short last row is filled up with zeros. */
#define MH_DIGEST_LANES 16

struct mh_digest {
    uint64_t sums[MH_DIGEST_LANES], places[MH_DIGEST_LANES], bytes;
};

void mh_digest_add(struct mh_digest *digest, const void *memory, size_t bytes);
uint64_t mh_digest_end(const struct mh_digest *digest);

/* Digests of blocks of MH_BLOCK_BYTES of weights with their optimizer state, numbered over all pieces: before and after
 * an update. */
struct mh_watch {
    uint64_t *found, *left;
};

/* `sources` has `num_sources` addresses for each piece: its gradients, which the program adds up. `watch` may be NULL.
 * */
int mh_update(const struct mh_update *update, const struct mh_piece *pieces, size_t num_pieces,
              const void *const *sources, size_t num_sources, const int32_t *program, size_t length,
              const struct mh_watch *watch);

/* Like memcpy, for large copies that are not read soon. */
void mh_copy(void *to, const void *from, size_t bytes);

/* Each block of `block` values is encoded as a scale and as many integers. `residual` may be NULL; else it is added to
 * the values first, and afterwards contains the error of the encoding. */
void mh_int8_encode(const float *values, float *residual, float *scales, int8_t *codes, size_t count, size_t block);
/* With `add`, adds to `values` instead of overwriting them; mh_bf16_add also adds. */
void mh_int8_decode(const float *scales, const int8_t *codes, float *values, size_t count, size_t block, int add);
void mh_bf16_add(const uint16_t *halves, float *values, size_t count);

/* Large pages. mh_allocate_large allocates a range of a file, which must be empty, in large pages, as far as the kernel
 * can, and without an error where it cannot. mh_map_again maps memory that begins at a large page of its file a second
 * time, aligned so that large pages are used; until mh_unmap, or NULL if that fails. */
#define MH_LARGE_PAGE ((size_t)1 << 21)
void mh_allocate_large(int fd, int64_t offset, size_t bytes);
void *mh_map_again(void *memory, size_t bytes);
void mh_unmap(void *memory, size_t bytes);

static inline size_t mh_whole_pages(size_t bytes) { return (bytes + MH_LARGE_PAGE - 1) / MH_LARGE_PAGE * MH_LARGE_PAGE; }

#endif
