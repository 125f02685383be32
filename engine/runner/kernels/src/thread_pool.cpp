// Threads of the kernels, and the queue of their work.

#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace baton {

namespace {

// Waiting threads spin for a few microseconds, then sleep: a spinning thread would take the core
// from other processes on the machine. While they spin, they prefetch what is read next. The caller
// does the parts of threads that have not begun when it has done its own, so that a thread that
// gets no core delays nobody.
class ThreadPool {
  public:
    static ThreadPool& instance() {
        static ThreadPool* pool =
            new ThreadPool;  // never destroyed: its threads end with the process
        return *pool;
    }

    void run(int count, const Task& task) {
        count = count < kMaxThreads ? count : kMaxThreads;
        std::lock_guard<std::mutex> lock(mutex_);
        while (int(threads_.size()) < count - 1) {
            const int index = int(threads_.size()) + 1;
            const std::uint32_t seen = round_.load();
            threads_.emplace_back([this, index, seen] { work(index, seen); });
        }
        task_ = &task;
        count_.store(count);
        pending_.store(count - 1);
        for (int index = 1; index < count; ++index) is_free_[index].store(true);
        round_.fetch_add(1);
        round_.notify_all();
        task.call(task.part, 0, count);
        for (int index = 1; index < count; ++index) run_if_free(index);
        wait_until(pending_, 0);
    }

    void expect(const void* memory, std::int64_t num_bytes) {
        expected_bytes_.store(num_bytes, std::memory_order_relaxed);
        expected_.store(static_cast<const char*>(memory), std::memory_order_release);
    }

  private:
    static constexpr int kMaxSpins = 2000;
    static constexpr int kMaxThreads = 255;

    // Beginning of a thread's slice of the expected memory, as much as may stay in its L2.
    struct Prefetch {
        static constexpr std::int64_t kMaxBytes = 1 << 17, kLineBytes = 64, kLines = 4;
        const char *memory = nullptr, *at = nullptr, *end = nullptr;

        void begin(const char* expected, std::int64_t num_bytes, int index, int count) {
            memory = expected;
            at = expected + num_bytes * index / count;
            end = at + std::min(num_bytes / count, kMaxBytes);
        }
        // Returns false if nothing is left.
        bool next() {
            if (at >= end) return false;
            for (int i = 0; i < kLines; ++i, at += kLineBytes) __builtin_prefetch(at, 0, 2);
            return true;
        }
    };

    // Does a part that no thread has begun. The round does not end before, so the task is its own.
    void run_if_free(int index) {
        if (!is_free_[index].load() || !is_free_[index].exchange(false)) return;
        task_->call(task_->part, index, count_.load());
        if (pending_.fetch_sub(1) == 1) pending_.notify_one();
    }

    // An idle thread can miss rounds.
    void work(int index, std::uint32_t seen) {
        Prefetch prefetch;
        for (;;) {
            for (int i = 0; i < kMaxSpins && round_.load() == seen; ++i) {
                const char* const expected = expected_.load(std::memory_order_acquire);
                if (expected != prefetch.memory)
                    prefetch.begin(expected, expected_bytes_.load(std::memory_order_relaxed), index,
                                   count_.load(std::memory_order_relaxed));
                if (!prefetch.next()) pause();
            }
            round_.wait(seen);
            seen = round_.load();
            run_if_free(index);
        }
    }

    static void wait_until(std::atomic<int>& value, int wanted) {
        for (int i = 0; i < kMaxSpins && value.load() != wanted; ++i) pause();
        for (int now = value.load(); now != wanted; now = value.load()) value.wait(now);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    std::mutex mutex_;
    std::vector<std::thread> threads_;
    // What idle threads read all the time has a cache line of its own.
    alignas(64) std::atomic<std::uint32_t> round_{0};
    std::atomic<const char*> expected_{nullptr};
    std::atomic<std::int64_t> expected_bytes_{0};
    alignas(64) std::atomic<int> pending_{0};      // parts that are not done, without the caller's
    std::atomic<int> count_{1};                    // threads of the round
    std::atomic<bool> is_free_[kMaxThreads] = {};  // by part: nobody has begun it
    const Task* task_ = nullptr;
};

}  // namespace

void run_parallel(int count, const Task& task) { ThreadPool::instance().run(count, task); }

void expect_reads(const void* memory, std::int64_t num_bytes) {
    ThreadPool::instance().expect(memory, num_bytes);
}

struct alignas(64) WorkQueue::Run {
    std::int64_t first, size;
    std::atomic<std::uint64_t> left;  // index of the first remaining unit | end << 32

    bool take(Unit& unit, bool is_own) {
        std::uint64_t now = left.load(), at;
        do {
            const std::uint64_t begin = now & 0xffffffffu, end = now >> 32;
            if (begin == end) return false;
            at = is_own ? begin : end - 1;
        } while (!left.compare_exchange_weak(now, is_own ? now + 1 : now - (1ull << 32)));
        unit = {first + std::int64_t(at) % size, std::int64_t(at) / size};
        return true;
    }
};

WorkQueue::WorkQueue(std::int64_t total, std::int64_t passes, int num_threads)
    : runs_(num_threads) {
    for (int i = 0; i < num_threads; ++i) {
        const Slice slice(total, i, num_threads);
        runs_[i].first = slice.first, runs_[i].size = slice.end - slice.first;
        runs_[i].left = std::uint64_t(runs_[i].size * passes) << 32;
    }
}

WorkQueue::~WorkQueue() = default;

bool WorkQueue::next(int thread, Unit& unit) {
    const int count = int(runs_.size());
    if (runs_[thread].take(unit, true)) return true;
    for (int i = 1; i < count; ++i)
        if (runs_[(thread + i) % count].take(unit, false)) return true;
    return false;
}

}  // namespace baton
