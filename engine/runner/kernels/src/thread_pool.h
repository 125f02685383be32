// Thread pool that runs one task at a time together with the calling thread, and loops on it.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

struct Task {
    const void* part;
    void (*call)(const void* part, int i, int count);
};

void run_parallel(int count, const Task& task);

// Calls part(i, count) for each i < count in parallel; returns when all calls are done.
template <typename Part>
void run_parallel(int count, const Part& part) {
    if (count <= 1) return part(0, 1);
    run_parallel(count, Task{&part, [](const void* called, int i, int total) {
                                 (*static_cast<const Part*>(called))(i, total);
                             }});
}

// Names memory of which each thread will read its slice. Only a hint.
void expect_reads(const void* memory, std::int64_t num_bytes);

// The i-th of `count` slices of [0, total) of about equal length.
struct Slice {
    std::int64_t first, end;
    Slice(std::int64_t total, int i, int count)
        : first(total * i / count), end(total * (i + 1) / count) {}
};

// Work stealing: each thread has a run of units, repeated for a number of passes. A thread without
// units takes the last one of another thread, so a core that is busy with other work does not delay
// all others.
class WorkQueue {
  public:
    struct Unit {
        std::int64_t index, pass;
    };

    WorkQueue(std::int64_t total, std::int64_t passes, int num_threads);
    ~WorkQueue();

    // Returns false if no unit is left for this thread.
    bool next(int thread, Unit& unit);

  private:
    struct Run;

    std::vector<Run> runs_;
};

// Parallel loop: calls part(first, end) for ranges that cover [0, total). `unit_size` is the
// number of elements of a unit; a range has at least kMinElements, enough to be worth a thread.
template <typename Part>
void parallel_for(std::int64_t total, std::int64_t unit_size, int num_threads, Part part) {
    constexpr std::int64_t kMinElements = 16384;
    const std::int64_t range = unit_size < kMinElements ? kMinElements / unit_size : 1;
    const std::int64_t parts = (total + range - 1) / range;
    if (parts < num_threads) num_threads = int(parts);
    if (num_threads <= 1) return part(0, total);
    WorkQueue queue(parts, 1, num_threads);
    run_parallel(num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t first = unit.index * range;
            part(first, first + range < total ? first + range : total);
        }
    });
}

}  // namespace baton
