/* Every collective on 1 to 4 forked ranks, with lengths around every border; built with sanitizers by test_plane.py. */
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
    exit(0);
}

int main(void) {
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
    puts("ok");
    return 0;
}
