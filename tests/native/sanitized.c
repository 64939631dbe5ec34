/* Every collective on 1 to 4 forked ranks, every optimizer, the codec and tables of rows, with lengths around every
 * border; built with sanitizers by test_plane.py. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core.h"

#define TIMEOUT_NS 20000000000LL
#define CHECK(what)                                                      \
    if (!(what)) {                                                       \
        fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what);       \
        exit(1);                                                         \
    }

static const size_t counts[] = {0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 5000};

/* Of ranks 0 to 3: ((0 + 1) + (2 + 3)), cut off. */
static size_t program_of(uint32_t world, int32_t *program) {
    static const int32_t programs[4][7] = {{0}, {0, 1, -1}, {0, 1, -1, 2, -1}, {0, 1, -1, 2, 3, -1, -1}};
    static const size_t lengths[4] = {1, 3, 5, 7};
    memcpy(program, programs[world - 1], sizeof programs[0]);
    return lengths[world - 1];
}

static void all_calls(struct mh_plane *plane, int dtype, size_t count) {
    size_t item = mh_item_bytes(dtype), bytes = count * item;
    int32_t program[7];
    size_t length = program_of(plane->world, program);
    /* Exact sizes, so that one byte too many is found. */
    unsigned char *data = calloc(1, bytes), *all = calloc(plane->world, bytes), *part = calloc(1, bytes);
    CHECK(mh_all_reduce(plane, data, count, dtype, program, length, TIMEOUT_NS) == 0);
    CHECK(mh_reduce_scatter(plane, part, all, count, dtype, program, length, TIMEOUT_NS) == 0);
    memset(data, (int)plane->rank + 1, bytes);
    CHECK(mh_all_gather(plane, all, data, bytes, TIMEOUT_NS) == 0);
    for (uint32_t rank = 0; rank < plane->world; rank++) {
        for (size_t i = 0; i < bytes; i++) CHECK(all[rank * bytes + i] == rank + 1);
    }
    CHECK(mh_broadcast(plane, data, bytes, plane->world - 1, TIMEOUT_NS) == 0);
    for (size_t i = 0; i < bytes; i++) CHECK(data[i] == plane->world);
    free(data), free(all), free(part);
}

static void be_rank(void *base, size_t bytes, uint32_t rank, uint32_t world, size_t area_bytes) {
    struct mh_plane plane;
    CHECK(mh_plane_open(&plane, base, bytes, rank, world, area_bytes) == 0);
    for (int dtype = 0; dtype < MH_NUM_DTYPES; dtype++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) all_calls(&plane, dtype, counts[i]);
    }
    float ones[3] = {1, 1, 1};
    int32_t program[7];
    size_t length = program_of(world, program);
    CHECK(mh_all_reduce(&plane, ones, 3, MH_F32, program, length, TIMEOUT_NS) == 0);
    CHECK(ones[0] == (float)world && ones[2] == (float)world);
    int32_t bad[] = {0, MH_ADD};
    CHECK(mh_all_reduce(&plane, ones, 3, MH_F32, bad, 2, TIMEOUT_NS) == MH_BAD_ARGUMENT);
    CHECK(mh_all_reduce(&plane, ones, 3, 99, program, length, TIMEOUT_NS) == MH_BAD_ARGUMENT);
    CHECK(mh_meet(&plane, TIMEOUT_NS) == 0);
    /* Around the border of 32 bits; what was written before a post is there after it. */
    uint32_t *written = (uint32_t *)(plane.base + bytes - (size_t)world * 64);
    for (uint32_t number = UINT32_MAX - 20; number != 20; number++) {
        written[rank * 16] = number;
        mh_post(&plane, number);
        CHECK(mh_wait_posted(&plane, number, TIMEOUT_NS) == 0 && mh_all_posted(&plane, number));
        for (uint32_t other = 0; other < world; other++) CHECK((int32_t)(written[other * 16] - number) >= 0);
        CHECK(mh_meet(&plane, TIMEOUT_NS) == 0);
        CHECK(!mh_all_posted(&plane, number + 1));
        CHECK(mh_meet(&plane, TIMEOUT_NS) == 0);
    }
    exit(0);
}

/* Exact sizes, from any place to any other. */
static void copy_from(size_t bytes, size_t skip) {
    unsigned char *from = malloc(bytes + skip), *to = calloc(bytes + 3, 1);
    for (size_t i = 0; i < bytes + skip; i++) from[i] = (unsigned char)(i % 251 + 1);
    mh_copy(to + 3, from + skip, bytes);
    for (size_t i = 0; i < bytes; i++) CHECK(to[3 + i] == from[skip + i]);
    CHECK(to[0] == 0 && to[1] == 0 && to[2] == 0);
    free(from), free(to);
}

/* Exact sizes again: one copy and two, one gradient and three. */
static void update_all(size_t count, int two_copies, size_t num_sources) {
    static const int32_t program[] = {0, 1, MH_ADD, 2, MH_ADD};
    size_t bytes = count * sizeof(float);
    float *memory[11];
    for (size_t i = 0; i < 11; i++) {
        memory[i] = malloc(bytes);
        for (size_t k = 0; k < count; k++) memory[i][k] = 0.25f * (float)(k % 7 + i);
    }
    struct mh_piece piece = {.count = count, .w = memory[0], .to = memory[two_copies ? 4 : 0]};
    for (size_t i = 0; i < MH_MAX_STATES; i++) {
        piece.from[i] = memory[1 + i];
        piece.state[i] = memory[(two_copies ? 5 : 1) + i];
    }
    const void *sources[] = {memory[8], memory[9], memory[10]};
    size_t num_blocks = (bytes + MH_BLOCK_BYTES - 1) / MH_BLOCK_BYTES;
    uint64_t *found = calloc(num_blocks, sizeof(uint64_t)), *left = calloc(num_blocks, sizeof(uint64_t));
    struct mh_watch all = {.found = found, .left = left};
    for (int optimizer = 0; optimizer < MH_NUM_OPTIMIZERS; optimizer++) {
        for (int32_t flags = 0; flags < 8; flags++) {
            struct mh_update how = {.optimizer = optimizer, .first = flags & 1, .nesterov = flags >> 1 & 1, .maximize = 1,
                                    .extra = flags >> 2, .factor = 0.5f, .clip = 0.5f, .step_size = -0.1f,
                                    .weight_decay = 0.1f, .shrink = 0.9f, .momentum = 0.9f, .gradient_share = 0.6f,
                                    .second_keep = 0.9f, .second_share = 0.1f, .root_divisor = 0.5f, .eps = 0.1f};
            size_t length = num_sources == 1 ? 1 : 5;
            CHECK(mh_update(&how, &piece, 1, sources, num_sources, program, length, NULL) == 0);
            CHECK(mh_update(&how, &piece, 1, sources, num_sources, program, length, &all) == 0);
            uint64_t before = num_blocks ? left[num_blocks - 1] : 0;
            CHECK(mh_update(&how, &piece, 1, sources, num_sources, program, length, &all) == 0);
            if (num_blocks && !two_copies) CHECK(found[num_blocks - 1] == before);
        }
    }
    free(found), free(left);
    for (size_t i = 0; i < 11; i++) free(memory[i]);
}

static void encode_and_decode(size_t count, size_t block, int with_residual) {
    size_t num_blocks = (count + block - 1) / block;
    float *values = malloc(count * sizeof(float)), *found = malloc(count * sizeof(float));
    float *scales = malloc(num_blocks * sizeof(float)), *residual = calloc(count, sizeof(float));
    int8_t *codes = malloc(count);
    for (size_t i = 0; i < count; i++) values[i] = i % 97 == 13 ? -3e38f : 0.01f * (float)(i % 251);
    if (count > 5) values[5] = values[4] / 0.0f;
    mh_int8_encode(values, with_residual ? residual : NULL, scales, codes, count, block);
    mh_int8_decode(scales, codes, found, count, block, 0);
    for (size_t i = block; i < count; i++) CHECK(found[i] - values[i] <= scales[i / block]);
    memset(found, 0, count * sizeof(float));
    mh_int8_decode(scales, codes, found, count, block, 1);
    for (size_t i = block; i < count; i++) CHECK(found[i] - values[i] <= scales[i / block]);
    uint16_t *halves = malloc(count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) halves[i] = 0x3f80, found[i] = 2; /* 1, as half a float */
    mh_bf16_add(halves, found, count);
    for (size_t i = 0; i < count; i++) CHECK(found[i] == 3);
    free(halves);
    free(values), free(found), free(scales), free(residual), free(codes);
}

void all_rows(void); /* sanitized_rows.c */

int main(void) {
    all_rows();
    for (uint32_t world = 1; world <= 4; world++) {
        size_t area_bytes = 64 * world * 16, bytes = mh_plane_bytes(world, area_bytes);
        void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(base != MAP_FAILED);
        for (uint32_t rank = 0; rank < world; rank++) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) be_rank(base, bytes, rank, world, area_bytes);
        }
        for (uint32_t rank = 0; rank < world; rank++) {
            int status;
            CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        munmap(base, bytes);
    }
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int either = 0; either < 2; either++) {
            update_all(counts[i], either, 1);
            update_all(counts[i], either, 3);
            encode_and_decode(counts[i], 1024, either);
            encode_and_decode(counts[i], 16, either);
        }
        for (size_t skip = 0; skip < 70; skip += 23) copy_from(counts[i], skip);
    }
    puts("ok");
    return 0;
}
