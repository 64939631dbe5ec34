/* Shared memory in pages of 2 MB. Embedding rows are accessed at random: with small pages, translating a row's address
 * (TLB misses) takes longer than reading it. */
#define _GNU_SOURCE
#include "core.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Reserve address space for `bytes`, aligned to a large page. */
static unsigned char *reserve(size_t bytes) {
    size_t whole = mh_whole_pages(bytes);
    unsigned char *room = mmap(NULL, whole + MH_LARGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return NULL;
    size_t before = (MH_LARGE_PAGE - (uintptr_t)room % MH_LARGE_PAGE) % MH_LARGE_PAGE;
    if (before) munmap(room, before);
    munmap(room + before + whole, MH_LARGE_PAGE - before);
    return room + before;
}

void mh_unmap(void *memory, size_t bytes) { munmap(memory, mh_whole_pages(bytes)); }

void *mh_map_again(void *memory, size_t bytes) {
    unsigned char *at = reserve(bytes);
    if (at == NULL) return NULL;
    /* On Linux, mremap with an old length of 0 maps the same shared pages a second time. */
    if (mremap(memory, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED) return at;
    mh_unmap(at, bytes);
    return NULL;
}

void mh_allocate_large(int fd, int64_t offset, size_t bytes) {
    unsigned char *at = reserve(bytes);
    if (at == NULL) return;
    /* MADV_COLLAPSE needs one small page in each range of 2 MB; more than one would have to be copied. */
    int64_t end = offset + (int64_t)(bytes / MH_LARGE_PAGE * MH_LARGE_PAGE);
    int done = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset) != MAP_FAILED;
    for (int64_t page = offset; done && page < end; page += MH_LARGE_PAGE) done = pwrite(fd, "", 1, page) == 1;
    if (done) madvise(at, bytes, MADV_COLLAPSE); /* as far as the kernel has free memory in such pages */
    mh_unmap(at, bytes);
}
