/* What kernels share their work by. */
#ifndef THREADS_H
#define THREADS_H

#include <stdint.h>

/* One of a job's items; `thread` counts from 0, which is the caller. */
typedef void item_function(const void *job, int64_t item, int thread);

/* Runs items 0 to count - 1 on up to num_threads threads, and returns when all are done. They are
 * begun in order. What they write is seen by whoever runs the next ones. */
void lockstep_run_items(item_function *run, const void *job, int64_t count, int32_t num_threads);

/* A kernel: what it is told once, and how many rows it gets this time. */
typedef void kernel_function(const void *arguments, int64_t num_rows);

#endif
