/* Sums and meetings in memory that the workers of one host share. Neither Python nor torch in here: pointers and
 * lengths in, numbers out. `sum.c` adds along a tree, `plane.c` lets ranks meet and move data, `update.c` turns a sum
 * of gradients into new weights, `codec.c` makes fp32 smaller, `digest.c` tells whether memory has changed, `copy.c`
 * copies, `pages.c` has memory in large pages. Rows of embeddings have a header of their own, rows.h. Start reading at
 * mh_all_reduce. */
#ifndef MANYHANDS_CORE_H
#define MANYHANDS_CORE_H

#include <stddef.h>
#include <stdint.h>

/* Vectorised for the CPU that it runs on, chosen when the library is loaded by what the CPU can do; by a model's name it
 * would be one maker's CPUs only. Vectors of 512 bits add up memory no faster than those of 256. What is marked so gives
 * the same bits on every CPU. A sanitizer cannot be called as early as the choice is made. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define MH_FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define MH_FOR_THIS_CPU
#endif

enum { MH_F32, MH_F64, MH_BF16, MH_F16, MH_I64, MH_NUM_DTYPES };

size_t mh_item_bytes(int dtype); /* 0 for a dtype that there is not */

/* A tree of additions as a postfix program: a number pushes that source, MH_ADD replaces the two topmost by their sum.
 * Every addition is rounded to the dtype, so the result depends on the program alone: not on who adds, how many ranks
 * there are, or where a buffer is cut. */
#define MH_ADD (-1)

/* 0 where the program has `num_sources` sources to push and leaves one value. */
int mh_check_program(const int32_t *program, size_t length, size_t num_sources);

/* `target` may be one of the sources. 0, or MH_NO_MEMORY. The program must have been checked. */
int mh_sum(void *target, const void *const *sources, const int32_t *program, size_t length, size_t count, int dtype);

/* At most MH_BLOCK_BYTES of it, from `offset` bytes into each source. `scratch` holds MH_MAX_DEPTH blocks; `target` is
 * none of the sources, and is a block of its own. */
#define MH_BLOCK_BYTES 4096
#define MH_MAX_DEPTH 64
void mh_sum_block(void *target, const void *const *sources, size_t offset, const int32_t *program, size_t length,
                  size_t count, int dtype, unsigned char *scratch);

/* What a call on a plane returns besides 0; a rank that did not arrive is told as MH_MISSING + rank. */
enum { MH_ABORTED = 1, MH_BAD_ARGUMENT = 2, MH_NO_MEMORY = 3, MH_UNLIKE = 4, MH_MISSING = 16 };

/* What a rank comes to a meeting for. */
#define MH_PURPOSE_BYTES 60
struct mh_purpose {
    uint32_t length;
    char text[MH_PURPOSE_BYTES]; /* as much of it as there is room for, and zeros */
};

/* One rank's view of the shared memory. Not shared itself. */
struct mh_plane {
    unsigned char *base;
    uint32_t rank, world;
    size_t area_bytes;
    uint32_t meetings, turns;
    struct mh_purpose purpose;
};

size_t mh_plane_bytes(uint32_t world, size_t area_bytes);

/* Fresh shared memory is all zero, which is what a plane starts from: nothing has to be written first. */
int mh_plane_open(struct mh_plane *plane, void *base, size_t bytes, uint32_t rank, uint32_t world, size_t area_bytes);

/* Everybody who waits for somebody, now or later, gets MH_ABORTED. Any process that maps the memory may call it; `rank` is
 * whose fault it is, which mh_lost_rank tells: the first one named, -1 where there is none. */
void mh_abort(void *base, uint32_t world, uint32_t rank);
int64_t mh_lost_rank(const void *base);

/* Why this rank makes the calls that follow. */
void mh_set_purpose(struct mh_plane *plane, const char *text, size_t length);
/* Why `rank` came to the last meeting. */
const struct mh_purpose *mh_purpose_of(const struct mh_plane *plane, uint32_t rank);

/* Every call below is made by all ranks in the same order with the same sizes, and returns within `timeout_ns` per
 * meeting: a rank that waited in vain aborts the plane, so that nobody waits any longer for it. Ranks that met for
 * different purposes all get MH_UNLIKE. */
int mh_meet(struct mh_plane *plane, int64_t timeout_ns);

/* Word for whoever looks, without a meeting: what this rank wrote to shared memory before it posted `number` is there for
 * all who see that number, or a later one. A rank's numbers ascend, and go round after 2^32. The first call returns at once,
 * the second whether every rank has come that far; the third waits for it, as a meeting does. */
void mh_post(struct mh_plane *plane, uint32_t number);
int mh_all_posted(const struct mh_plane *plane, uint32_t number);
int mh_wait_posted(struct mh_plane *plane, uint32_t number, int64_t timeout_ns);

int mh_all_reduce(struct mh_plane *plane, void *data, size_t count, int dtype, const int32_t *program, size_t length,
                  int64_t timeout_ns);
/* `input` holds `world` parts of `count` elements; `output` gets the sum of this rank's part. */
int mh_reduce_scatter(struct mh_plane *plane, void *output, const void *input, size_t count, int dtype,
                      const int32_t *program, size_t length, int64_t timeout_ns);
int mh_all_gather(struct mh_plane *plane, void *output, const void *input, size_t bytes, int64_t timeout_ns);
int mh_broadcast(struct mh_plane *plane, void *data, size_t bytes, uint32_t source, int64_t timeout_ns);

/* How an optimizer changes fp32 weights: its settings of this step, with what torch computes in double done by the
 * caller. Names are the roles that numbers play in update.c; not every optimizer has every one. */
enum { MH_SGD, MH_ADAM, MH_ADAGRAD, MH_RMSPROP, MH_NUM_OPTIMIZERS };

struct mh_update {
    int32_t optimizer, first, nesterov, maximize, extra; /* `first`: there is no momentum yet; `extra`: third state */
    float factor, clip;                                  /* the gradient is multiplied by both, one after the other */
    float step_size;                                     /* the learning rate with its sign and bias correction */
    float weight_decay, shrink;                          /* added to the gradient; multiplied to the weights */
    float momentum, gradient_share, second_keep, second_share;
    float root_divisor, eps;
};

#define MH_MAX_STATES 3

/* A stretch of weights with its states. Old values are read from `w` and `from`, new ones written to `to` and `state`:
 * the same memory, or another copy, which leaves the old one whole. */
struct mh_piece {
    uint64_t count;
    const float *w;
    float *to;
    const float *from[MH_MAX_STATES];
    float *state[MH_MAX_STATES];
};

/* What memory holds, in one number. Start with zeros; a whole is what was added, one after the other, in whole rows of
 * lanes: a last row that is short counts as one with zeros behind it. */
#define MH_DIGEST_LANES 16

struct mh_digest {
    uint64_t sums[MH_DIGEST_LANES], places[MH_DIGEST_LANES], bytes;
};

void mh_digest_add(struct mh_digest *digest, const void *memory, size_t bytes);
uint64_t mh_digest_end(const struct mh_digest *digest);

/* Digests of blocks of MH_BLOCK_BYTES of weights, counted over the pieces, together with their states: as an update finds
 * them, and as it leaves them. */
struct mh_watch {
    uint64_t *found, *left;
};

/* `sources` has `num_sources` addresses for each piece: its gradients, which the program adds up. `watch` may be NULL. */
int mh_update(const struct mh_update *update, const struct mh_piece *pieces, size_t num_pieces,
              const void *const *sources, size_t num_sources, const int32_t *program, size_t length,
              const struct mh_watch *watch);

/* As memcpy, for what is large and not read soon. */
void mh_copy(void *to, const void *from, size_t bytes);

/* Blocks of `block` values become a scale each and as many whole numbers. `residual` may be NULL; else it is added to the
 * values first, and holds afterwards what the codes do not tell. */
void mh_int8_encode(const float *values, float *residual, float *scales, int8_t *codes, size_t count, size_t block);
/* With `add`, to what is in `values`; so does the one below, with halves of floats. */
void mh_int8_decode(const float *scales, const int8_t *codes, float *values, size_t count, size_t block, int add);
void mh_bf16_add(const uint16_t *halves, float *values, size_t count);

/* Memory in large pages: of a file that has nothing there yet, as far as the kernel can, and without a word where it cannot;
 * and mapped a second time, so that they are of use, where it begins at such a page of its file. The latter until mh_unmap, or
 * NULL where it cannot be. */
#define MH_LARGE_PAGE ((size_t)1 << 21)
void mh_allocate_large(int fd, int64_t offset, size_t bytes);
void *mh_map_again(void *memory, size_t bytes);
void mh_unmap(void *memory, size_t bytes);

static inline size_t mh_whole_pages(size_t bytes) { return (bytes + MH_LARGE_PAGE - 1) / MH_LARGE_PAGE * MH_LARGE_PAGE; }

#endif
