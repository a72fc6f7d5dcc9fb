#include "proxy/tests/copy_programs.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "proxy/tests/support.h"

namespace {

constexpr std::size_t legacy = 0, blocking = 1, of_collectives = 2;

void join(auto& clock, const auto& other) {
  for (std::size_t stream = 0; stream < clock.size(); ++stream)
    clock[stream] = std::max(clock[stream], other[stream]);
}

}  // namespace

CopyPrograms::CopyPrograms(CopyPlatform platform, std::size_t cell_ints)
    : platform_(std::move(platform)), cell_ints_(cell_ints) {
  for (std::size_t i = 0; i < buffers; ++i) {
    const std::size_t count = length * cell_ints;
    ok(cudaMalloc(reinterpret_cast<void**>(&device_[i].begin), count * sizeof(int)));
    ok(cudaMallocHost(reinterpret_cast<void**>(&pinned_[i].begin), count * sizeof(int)));
    device_[i].model.resize(count);
    pinned_[i].model.resize(count);
  }
  ok(cudaMallocHost(reinterpret_cast<void**>(&flags_), gates * sizeof(int)));
  for (std::size_t i = 0; i < streams; ++i) {
    ok(cudaEventCreateWithFlags(&events_[i], cudaEventDisableTiming));
    if (i == legacy) continue;
    ok(cudaStreamCreateWithFlags(&streams_[i], i == blocking ? cudaStreamDefault : cudaStreamNonBlocking));
  }
}

CopyPrograms::~CopyPrograms() {
  for (std::size_t i = 0; i < streams; ++i) {
    ok(cudaEventDestroy(events_[i]));
    if (i != legacy) ok(cudaStreamDestroy(streams_[i]));
  }
  ok(cudaFreeHost(flags_));
  for (std::size_t i = 0; i < buffers; ++i) {
    ok(cudaFreeHost(pinned_[i].begin));
    ok(cudaFree(device_[i].begin));
  }
}

std::string CopyPrograms::run(uint32_t seed) {
  random_.seed(seed);
  program_.clear();
  difference_.clear();
  for (std::size_t i = 0; i < buffers; ++i) {
    Buffer &device = device_[i], &pinned = pinned_[i];
    for (int& value : device.model) value = static_cast<int>(random_() % 1000);
    for (int& value : pinned.model) value = static_cast<int>(random_() % 1000);
    std::ranges::copy(pinned.model, pinned.begin);
    ok(cudaMemcpy(device.begin, device.model.data(), device.model.size() * sizeof(int),
                  cudaMemcpyHostToDevice));
  }
  platform_.keep();
  for (std::size_t steps = 10 + number(50); steps > 0; --steps) step();
  open_gates();
  wait_for_all();
  for (std::size_t i = 0; i < buffers; ++i) {
    compare(pinned_[i].begin, pinned_[i].model.data(), pinned_[i].model.size(), "pinned memory in the end");
    std::vector<int> end(device_[i].model.size());
    ok(cudaMemcpy(end.data(), device_[i].begin, end.size() * sizeof(int), cudaMemcpyDeviceToHost));
    compare(end.data(), device_[i].model.data(), end.size(), "the device's memory in the end");
  }
  return difference_.empty() ? "" : "seed " + std::to_string(seed) + ": " + difference_ + "\n" + program_;
}

void CopyPrograms::step() {
  static constexpr struct {
    int weight;
    void (CopyPrograms::*make)();
  } kinds[] = {{40, &CopyPrograms::copy},          {8, &CopyPrograms::copy_pageable},
               {8, &CopyPrograms::fill},           {15, &CopyPrograms::launch},
               {10, &CopyPrograms::write_by_host}, {8, &CopyPrograms::read_by_host},
               {8, &CopyPrograms::order_streams},  {4, &CopyPrograms::wait},
               {6, &CopyPrograms::hold_up},        {12, &CopyPrograms::reduce}};
  int left = static_cast<int>(number(119));
  for (const auto& kind : kinds) {
    left -= kind.weight;
    if (left < 0) return (this->*kind.make)();
  }
}

CopyPrograms::Range CopyPrograms::range(std::array<Buffer, buffers>& among, std::size_t count) {
  return {&among[number(buffers)], number(length - count + 1), count};
}

// Of pinned memory and the device's.
void CopyPrograms::copy() {
  const std::size_t count = 1 + number(length), stream = number(streams);
  const bool from_device = chance(50), to_device = !from_device || chance(20);
  const Range from = range(from_device ? device_ : pinned_, count);
  const Range to = range(to_device ? device_ : pinned_, count);
  if (from.buffer == to.buffer) return;
  const cudaMemcpyKind kind = chance(10)    ? cudaMemcpyDefault
                              : !to_device  ? cudaMemcpyDeviceToHost
                              : from_device ? cudaMemcpyDeviceToDevice
                                            : cudaMemcpyHostToDevice;
  const bool waits = stream == legacy && chance(20);
  if (waits) open_gates();
  order(stream, {from}, {to});
  say("copy from " + name(from) + " to " + name(to) + " on stream " + std::to_string(stream) +
      (waits ? ", waited for" : ""));
  std::copy_n(model(from), ints(from), model(to));
  platform_.call();
  if (waits) {
    ok(cudaMemcpy(at(to), at(from), bytes(from), kind));
    if (!from_device || !to_device) join(host_, clocks_[legacy]);
  } else {
    ok(cudaMemcpyAsync(at(to), at(from), bytes(from), kind, streams_[stream]));
  }
  note(stream, {from}, {to});
  if (waits && !(from_device && to_device)) host_[legacy] = calls_[legacy];
}

void CopyPrograms::copy_pageable() {
  const std::size_t count = 1 + number(length), stream = number(streams);
  const Range there = range(device_, count);
  std::vector<int> here(ints(there));
  if (chance(50)) {
    order(stream, {}, {there});
    for (int& value : here) value = static_cast<int>(random_() % 1000);
    std::ranges::copy(here, model(there));
    say("copy from pageable memory to " + name(there) + " on stream " + std::to_string(stream));
    platform_.call();
    ok(cudaMemcpyAsync(at(there), here.data(), bytes(there), cudaMemcpyHostToDevice, streams_[stream]));
    std::ranges::fill(here, -1);
    note(stream, {}, {there});
    return;
  }
  order(stream, {there}, {});
  open_gates();
  say("copy from " + name(there) + " to pageable memory on stream " + std::to_string(stream));
  platform_.call();
  ok(cudaMemcpyAsync(here.data(), at(there), bytes(there), cudaMemcpyDeviceToHost, streams_[stream]));
  note(stream, {there}, {});
  join(host_, clocks_[stream]);
  compare(here.data(), model(there), here.size(), "a copy to pageable memory");
}

void CopyPrograms::fill() {
  const std::size_t stream = number(streams);
  const bool on_device = chance(50);
  const Range there = range(on_device ? device_ : pinned_, 1 + number(length));
  const int byte = static_cast<int>(number(256));
  const bool rows = chance(30);
  order(stream, {}, {there});
  say("fill of " + name(there) + (rows ? ", the first half of each," : "") + " on stream " +
      std::to_string(stream));
  platform_.call();
  if (rows) {  // the first half of each cell
    const std::size_t width = cell_ints_ / 2 * sizeof(int), pitch = cell_ints_ * sizeof(int);
    ok(cudaMemset2DAsync(at(there), pitch, byte, width, there.count, streams_[stream]));
    for (std::size_t cell = 0; cell < there.count; ++cell)
      std::memset(model(there) + cell * cell_ints_, byte, width);
  } else {
    ok(cudaMemsetAsync(at(there), byte, bytes(there), streams_[stream]));
    std::memset(model(there), byte, bytes(there));
  }
  note(stream, {}, {there});
}

void CopyPrograms::launch() {
  const std::size_t stream = number(streams);
  const Range to = range(device_, 1), from = range(device_, 1);
  order(stream, {from, to}, {to});
  const bool mixes = chance(50);
  say((mixes ? "kernel from " + name(from) + " to " + name(to) : "nap") + " on stream " +
      std::to_string(stream));
  platform_.call();
  if (mixes) {
    launch_mix(at(to), at(from), streams_[stream]);
    *model(to) =
        static_cast<int>(3 * static_cast<unsigned>(*model(to)) + static_cast<unsigned>(*model(from)));
  } else {
    // Not for long: what comes behind it is still to be done when the next calls are made.
    launch_nap(static_cast<int>(number(300)), streams_[stream]);
  }
  note(stream, {from, to}, {to});
}

// All ranks have the same.
void CopyPrograms::reduce() {
  if (!platform_.communicator) return;
  const Range there = range(device_, 1 + number(length));
  order(of_collectives, {there}, {there});
  say("all-reduce of " + name(there));
  platform_.call();
  platform_.collective();
  ok(ncclAllReduce(at(there), at(there), ints(there), ncclInt32, ncclSum, platform_.communicator,
                   streams_[of_collectives]));
  for (std::size_t i = 0; i < ints(there); ++i)
    model(there)[i] =
        static_cast<int>(static_cast<unsigned>(model(there)[i]) * static_cast<unsigned>(platform_.ranks));
  note(of_collectives, {there}, {there});
}

void CopyPrograms::write_by_host() {
  const Range there = range(pinned_, 1 + number(length));
  wait_for(unordered(host_, {}, {there}));
  say("the host writes to " + name(there));
  for (std::size_t i = 0; i < ints(there); ++i)
    at(there)[i] = model(there)[i] = static_cast<int>(random_() % 1000);
}

void CopyPrograms::read_by_host() {
  const Range there = range(pinned_, 1 + number(length));
  wait_for(unordered(host_, {there}, {}));
  say("the host reads " + name(there));
  compare(at(there), model(there), ints(there), "pinned memory");
}

void CopyPrograms::order_streams() { wait_in_stream(number(streams), number(streams)); }

void CopyPrograms::wait() {
  if (chance(70)) return wait_for_stream(number(streams));
  open_gates();
  if (chance(70)) wait_for_all();
  if (chance(50)) return;
  say("a minibatch begins");
  platform_.keep();
}

void CopyPrograms::hold_up() {
  if (!platform_.gates) return;
  if (chance(30)) return open_gates();
  const std::size_t stream = number(streams);
  // By turns: those of earlier programs stay open, since a replay may come by.
  int* flag = flags_ + next_gate_++ % gates;
  *flag = 0;
  closed_.push_back(flag);
  void* arguments[] = {&flag};
  say("stream " + std::to_string(stream) + " is held up");
  platform_.call();
  ok(cudaLaunchKernel(kernels::hold(), dim3(1), dim3(1), arguments, 0, streams_[stream]));
  note(stream, {}, {});
}

void CopyPrograms::open_gates() {
  for (int* const flag : closed_) std::atomic_ref<int>(*flag).store(1);
  closed_.clear();
}

std::vector<std::size_t> CopyPrograms::unordered(const Clock& clock, const std::vector<Range>& reads,
                                                 const std::vector<Range>& writes) const {
  std::vector<std::size_t> found;
  const auto look = [&](const Range& range, bool writes_there) {
    for (std::size_t cell = range.first; cell < range.first + range.count; ++cell) {
      const Cell& one = range.buffer->cells[cell];
      if (one.written > clock[one.writer]) found.push_back(one.writer);
      for (std::size_t stream = 0; writes_there && stream < streams; ++stream)
        if (one.read[stream] > clock[stream]) found.push_back(stream);
    }
  };
  for (const Range& range : reads) look(range, false);
  for (const Range& range : writes) look(range, true);
  std::ranges::sort(found);
  found.erase(std::ranges::unique(found).begin(), found.end());
  return found;
}

void CopyPrograms::order(std::size_t stream, const std::vector<Range>& reads,
                         const std::vector<Range>& writes) {
  if (stream == legacy) join(clocks_[legacy], clocks_[blocking]);
  if (stream == blocking) join(clocks_[blocking], clocks_[legacy]);
  join(clocks_[stream], host_);
  const auto before = unordered(clocks_[stream], reads, writes);
  if (chance(20)) return wait_for(before);
  for (const std::size_t other : before) wait_in_stream(stream, other);
}

void CopyPrograms::note(std::size_t stream, const std::vector<Range>& reads,
                        const std::vector<Range>& writes) {
  const uint64_t call = ++calls_[stream];
  clocks_[stream][stream] = call;
  for (const Range& range : reads)
    for (std::size_t cell = range.first; cell < range.first + range.count; ++cell)
      range.buffer->cells[cell].read[stream] = call;
  for (const Range& range : writes)
    for (std::size_t cell = range.first; cell < range.first + range.count; ++cell) {
      range.buffer->cells[cell].writer = stream;
      range.buffer->cells[cell].written = call;
    }
}

// The host waits for these streams, in one way or another.
void CopyPrograms::wait_for(const std::vector<std::size_t>& which) {
  for (const std::size_t stream : which) wait_for_stream(stream);
}

void CopyPrograms::wait_for_stream(std::size_t stream) {
  open_gates();
  say("the host waits for stream " + std::to_string(stream));
  const std::size_t way = number(4);
  platform_.call();
  if (way == 0) {
    ok(cudaEventRecord(events_[stream], streams_[stream]));
    platform_.call();
    ok(cudaEventSynchronize(events_[stream]));
  } else if (way == 1) {
    ok(cudaEventRecord(events_[stream], streams_[stream]));
    platform_.call();
    while (cudaEventQuery(events_[stream]) == cudaErrorNotReady) std::this_thread::yield();
  } else if (way == 2) {
    while (cudaStreamQuery(streams_[stream]) == cudaErrorNotReady) std::this_thread::yield();
  } else {
    ok(cudaStreamSynchronize(streams_[stream]));
  }
  join(host_, clocks_[stream]);
  for (Clock& clock : clocks_) join(clock, host_);
}

void CopyPrograms::wait_for_all() {
  say("the host waits for the device");
  platform_.call();
  ok(cudaDeviceSynchronize());
  host_ = calls_;
  for (Clock& clock : clocks_) join(clock, host_);
}

void CopyPrograms::wait_in_stream(std::size_t waits, std::size_t stream) {
  if (waits == stream) return;
  say("stream " + std::to_string(waits) + " waits for stream " + std::to_string(stream));
  platform_.call();
  ok(cudaEventRecord(events_[stream], streams_[stream]));
  platform_.call();
  ok(cudaStreamWaitEvent(streams_[waits], events_[stream], 0));
  join(clocks_[waits], clocks_[stream]);
}

void CopyPrograms::compare(const int* seen, const int* expected, std::size_t count, const char* what) {
  if (!difference_.empty()) return;
  const auto [one, other] = std::mismatch(seen, seen + count, expected);
  if (one == seen + count) return;
  difference_ = std::string(what) + " has " + std::to_string(*one) + " in place of " +
                std::to_string(*other) + " (" + std::to_string(one - seen) + " of " + std::to_string(count) +
                ")";
}

std::string CopyPrograms::name(const Range& range) const {
  const bool device = range.buffer >= device_.data() && range.buffer < device_.data() + buffers;
  const Buffer* const first = device ? device_.data() : pinned_.data();
  return (device ? "device " : "pinned ") + std::to_string(range.buffer - first) + " cells " +
         std::to_string(range.first) + " to " + std::to_string(range.first + range.count - 1);
}

void CopyPrograms::say(const std::string& text) { program_ += "  " + text + "\n"; }
