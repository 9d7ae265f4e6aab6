// Counts the live bytes of PyTorch's CPU allocator exactly.
//
// The counting allocator wraps the one that was there before and hands out its pointers, so alignment, raw_allocate
// (which requires that the data pointer is the context) and copy-on-write storages (which require the same) keep
// working. For that reason the requested size cannot travel in the DataPtr's context or in a header before the data: it
// is kept in a map from pointer to size, split into shards so that threads seldom meet.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace {

constexpr size_t kNumShards = 16;
constexpr uint8_t kPriority = 200;

struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> sizes;
};

struct State {
  c10::Allocator* base = nullptr;
  c10::DeleterFnPtr base_deleter = nullptr;
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
  std::atomic<bool> recording{false};
  std::mutex events_mutex;
  std::vector<int64_t> events;
  std::array<Shard, kNumShards> shards;
};

// Never destroyed: tensors of static lifetime are freed after the library's own statics would be.
State& state() {
  static State* const instance = new State;
  return *instance;
}

Shard& shard_of(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return state().shards[((address >> 6) ^ (address >> 12) ^ (address >> 20)) % kNumShards];
}

void change_live(int64_t delta) {
  State& s = state();
  const int64_t now = s.live.fetch_add(delta) + delta;
  int64_t seen = s.peak.load();
  while (now > seen && !s.peak.compare_exchange_weak(seen, now)) {
  }
}

void count(int64_t delta) {
  State& s = state();
  if (!s.recording.load(std::memory_order_relaxed)) {
    change_live(delta);
    return;
  }
  // Under the mutex the order of the events is the order in which the live bytes changed.
  const std::lock_guard<std::mutex> guard(s.events_mutex);
  change_live(delta);
  s.events.push_back(delta);
}

void remember(void* pointer, int64_t size) {
  Shard& shard = shard_of(pointer);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  shard.sizes[pointer] = size;
}

int64_t forget(void* pointer) {
  Shard& shard = shard_of(pointer);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto found = shard.sizes.find(pointer);
  if (found == shard.sizes.end()) {
    return 0;
  }
  const int64_t size = found->second;
  shard.sizes.erase(found);
  return size;
}

// The size is forgotten before the memory goes back: once it is back, another thread may get the same pointer.
void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  const int64_t size = forget(pointer);
  if (size != 0) {
    count(-size);
  }
  state().base_deleter(pointer);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* const pointer = state().base->raw_allocate(size);
    if (pointer != nullptr) {
      remember(pointer, static_cast<int64_t>(size));
      count(static_cast<int64_t>(size));
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    state().base->copy_data(to, from, size);
  }
};

#ifndef _WIN32
// A child forked while another thread holds a mutex would wait for ever: hold them all across the fork.
void lock_all() {
  state().events_mutex.lock();
  for (Shard& shard : state().shards) {
    shard.mutex.lock();
  }
}

void unlock_all() {
  for (Shard& shard : state().shards) {
    shard.mutex.unlock();
  }
  state().events_mutex.unlock();
}
#endif

}  // namespace

extern "C" {

// Returns 0 when the allocator in place cannot be wrapped. Installing again changes nothing.
int torchecho_install() {
  State& s = state();
  if (s.base != nullptr) {
    return s.base_deleter != nullptr;
  }
  s.base = c10::GetCPUAllocator();
  s.base_deleter = s.base->raw_deleter();
  if (s.base_deleter == nullptr) {
    return 0;
  }
#ifndef _WIN32
  pthread_atfork(&lock_all, &unlock_all, &unlock_all);
#endif
  static CountingAllocator* const counting = new CountingAllocator;
  c10::SetCPUAllocator(counting, kPriority);
  return c10::GetCPUAllocator() == counting;
}

int64_t torchecho_live() { return state().live.load(); }
int64_t torchecho_peak() { return state().peak.load(); }
void torchecho_reset_peak() { state().peak.store(state().live.load()); }

// Bytes of the allocation at this pointer; -1 when this allocator did not make it.
int64_t torchecho_size_of(void* pointer) {
  Shard& shard = shard_of(pointer);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto found = shard.sizes.find(pointer);
  return found == shard.sizes.end() ? -1 : found->second;
}

void torchecho_record(int on) {
  const std::lock_guard<std::mutex> guard(state().events_mutex);
  if (on != 0) {
    state().events.clear();
  }
  state().recording.store(on != 0);
}

int64_t torchecho_num_events() {
  const std::lock_guard<std::mutex> guard(state().events_mutex);
  return static_cast<int64_t>(state().events.size());
}

// Copies the first `capacity` events and returns how many were copied.
int64_t torchecho_events(int64_t* into, int64_t capacity) {
  const std::lock_guard<std::mutex> guard(state().events_mutex);
  int64_t copied = 0;
  for (; copied < capacity && copied < static_cast<int64_t>(state().events.size()); ++copied) {
    into[copied] = state().events[copied];
  }
  return copied;
}
}
