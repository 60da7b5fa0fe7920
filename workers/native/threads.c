/* Threads that share a kernel's work, and several kernels in one call.
 *
 * Work comes in items. The caller takes items beside its helpers, and waits for items that are begun,
 * not for helpers that haven't come: where other processes keep a processor busy, what is lost is
 * that processor's share. (OpenMP's regions wait for every thread to arrive.) All kernels of a
 * process share the helpers; who finds them at work for another thread works alone.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"
#include "waiting.h"

/* A helper waits awake between the kernels of a step: waking it takes longer than most of them. */
#define IDLE_NS 200000
/* And the caller for a helper's last item, unless that has lost its processor. */
#define LAST_NS 50000
#define LOOKS 16 /* between two looks at the clock */
#define LINE 128 /* two cache lines, which some processors fetch together */
#define MAX_THREADS 512

/* The state: how many helpers are inside, whether more may come in, which job it is. */
#define INSIDE 0x3ffu
#define OPEN 0x400u
#define JOB 0x800u

typedef struct {
    item_function *run;
    const void *job;
    int64_t count;
    int32_t num_threads;
} work;

static struct {
    uint32_t state __attribute__((aligned(LINE)));
    uint32_t sleepers, caller_sleeps;
    work work;
    int64_t next __attribute__((aligned(LINE)));
    pthread_mutex_t caller __attribute__((aligned(LINE)));
    int32_t num_helpers;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER};

static void sleep_on_state(uint32_t seen) {
    syscall(SYS_futex, &pool.state, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void wake_all(void) {
    syscall(SYS_futex, &pool.state, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static uint32_t look(void) { return __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST); }

static void take_items(int thread) {
    int64_t item;
    while ((item = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED)) < pool.work.count)
        pool.work.run(pool.work.job, item, thread);
}

static int is_new(uint32_t state, uint32_t last) {
    return (state & OPEN) && (state & ~(OPEN | INSIDE)) != last;
}

/* Returns the state in which a job is open that this helper hasn't been in. */
static uint32_t wait_for_job(uint32_t last) {
    for (;;) {
        for (int64_t until = now_ns() + IDLE_NS; now_ns() < until;)
            for (int i = 0; i < LOOKS; i++) {
                uint32_t state = look();
                if (is_new(state, last)) return state;
                relax();
            }
        __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        uint32_t state = look();
        if (!is_new(state, last)) sleep_on_state(state);
        __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    }
}

static void *help(void *number) {
    int thread = (int)(intptr_t)number;
    uint32_t last = JOB - 1; /* no job's */
    for (;;) {
        uint32_t state = wait_for_job(last);
        if (!__atomic_compare_exchange_n(
                &pool.state, &state, state + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST
            ))
            continue;
        last = state & ~(OPEN | INSIDE);
        if (thread < pool.work.num_threads) take_items(thread);
        state = __atomic_sub_fetch(&pool.state, 1, __ATOMIC_SEQ_CST);
        if (!(state & (OPEN | INSIDE)) && __atomic_load_n(&pool.caller_sleeps, __ATOMIC_SEQ_CST))
            wake_all();
    }
    return NULL;
}

/* Returns when no helper is inside; none comes in any more. */
static void wait_for_helpers(void) {
    if (!(look() & INSIDE)) return;
    for (int64_t until = now_ns() + LAST_NS; now_ns() < until;)
        for (int i = 0; i < LOOKS; i++) {
            if (!(look() & INSIDE)) return;
            relax();
        }
    __atomic_store_n(&pool.caller_sleeps, 1, __ATOMIC_SEQ_CST);
    for (uint32_t state; (state = look()) & INSIDE;) sleep_on_state(state);
    __atomic_store_n(&pool.caller_sleeps, 0, __ATOMIC_SEQ_CST);
}

/* A child has none of its parent's helpers. */
static void forget(void) {
    pool.state = pool.sleepers = pool.caller_sleeps = 0;
    pool.num_helpers = 0;
    pthread_mutex_init(&pool.caller, NULL);
}

/* Helpers are made when they are first asked for. Where the system gives no more, fewer help. */
static void make_helpers(int32_t count) {
    static int is_known;
    if (!is_known) is_known = pthread_atfork(NULL, NULL, forget) == 0;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (pool.num_helpers < count && pool.num_helpers < MAX_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(pool.num_helpers + 1))) break;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void lockstep_run_items(item_function *run, const void *job, int64_t count, int32_t num_threads) {
    if (num_threads > count) num_threads = count;
    if (num_threads < 2 || pthread_mutex_trylock(&pool.caller)) {
        for (int64_t item = 0; item < count; item++) run(job, item, 0);
        return;
    }
    if (pool.num_helpers < num_threads - 1) make_helpers(num_threads - 1);
    pool.work = (work){run, job, count, num_threads};
    pool.next = 0;
    __atomic_store_n(&pool.state, (pool.state + JOB) | OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST)) wake_all();
    take_items(0);
    __atomic_fetch_and(&pool.state, ~OPEN, __ATOMIC_SEQ_CST);
    wait_for_helpers();
    pthread_mutex_unlock(&pool.caller);
}

/* Mirrored by workers/native/calls.py. */
typedef struct {
    kernel_function *kernel;
    const void *arguments;
} call;

void run_calls(const call *calls, int64_t count, int64_t num_rows) {
    for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].arguments, num_rows);
}
