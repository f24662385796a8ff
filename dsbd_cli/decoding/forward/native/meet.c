/* Where the threads of one parallel region wait for each other, and share out work (`tiles.c`, `simd.c`). */
#include <stdatomic.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SPINS 1000 /* some 50 microseconds */

typedef struct {
    atomic_long waiting, asleep, workers;
    atomic_uint round;
} meeting;

static inline void pause_spin(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Wait until all threads of the region are here. Who waits long sleeps: the thread waited for may need
 * this very core, if others use the machine too. */
static void meet(meeting *m) {
    if (m->workers == 1) return;
    unsigned round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->waiting, 1) + 1 == m->workers) {
        atomic_store(&m->waiting, 0);
        atomic_fetch_add(&m->round, 1);
#ifdef __linux__
        if (atomic_load(&m->asleep)) syscall(SYS_futex, &m->round, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&m->round) != round) return;
        pause_spin();
    }
#ifdef __linux__
    atomic_fetch_add(&m->asleep, 1);
    while (atomic_load(&m->round) == round)
        syscall(SYS_futex, &m->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    atomic_fetch_sub(&m->asleep, 1);
#else
    while (atomic_load(&m->round) == round) sched_yield();
#endif
}

/* Tell the system that a weight's pages may be large: fewer misses in looking them up. */
void large_pages(void *data, long size) {
#ifdef MADV_HUGEPAGE
    madvise(data, (size_t)size, MADV_HUGEPAGE);
#else
    (void)data, (void)size;
#endif
}
