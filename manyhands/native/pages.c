/* Shared memory in pages of 2 MB. Rows of embeddings lie anywhere in theirs: in small pages, looking up where each one is
 * takes longer than reading it. */
#define _GNU_SOURCE
#include "core.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* An address that such a page may begin at, with room for `bytes` behind it that nobody else is given. */
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
    /* An old length of 0 is how Linux is asked for the same shared pages a second time. */
    if (mremap(memory, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED) return at;
    mh_unmap(at, bytes);
    return NULL;
}

void mh_allocate_large(int fd, int64_t offset, size_t bytes) {
    unsigned char *at = reserve(bytes);
    if (at == NULL) return;
    /* A page of 2 MB is made of small ones, of which there has to be one; where all are there, they would be copied. */
    int64_t end = offset + (int64_t)(bytes / MH_LARGE_PAGE * MH_LARGE_PAGE);
    int done = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset) != MAP_FAILED;
    for (int64_t page = offset; done && page < end; page += MH_LARGE_PAGE) done = pwrite(fd, "", 1, page) == 1;
    if (done) madvise(at, bytes, MADV_COLLAPSE); /* as far as there are stretches of that length */
    mh_unmap(at, bytes);
}
