// Random programs of copies both ways, kernels, fills, events and streams over a few buffers, which the host
// writes to and reads between. Nothing in them races by CUDA's rules, so all that they see follows from the
// order of their calls: a model in plain memory says what it must be.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

// Where a program runs.
struct CopyPlatform {
  std::function<void()> keep = [] {};  // a minibatch begins
  std::function<void()> call = [] {};  // before each call of the program
  std::function<void()> collective = [] {};
  // Whether streams are held up until the host lets them go on.
  bool gates = true;
  // Of all that run the same program at one time.
  ncclComm_t communicator = nullptr;
  int ranks = 1;
};

class CopyPrograms {
 public:
  // cell_ints: the shortest that is copied.
  CopyPrograms(CopyPlatform platform, std::size_t cell_ints);
  ~CopyPrograms();
  CopyPrograms(const CopyPrograms&) = delete;
  CopyPrograms& operator=(const CopyPrograms&) = delete;

  // Empty if all was as the model says; else what was not, and the program.
  std::string run(uint32_t seed);

 private:
  static constexpr std::size_t buffers = 3, length = 8, streams = 4, gates = 10'000;
  // By stream, how many of its calls are over before something.
  using Clock = std::array<uint64_t, streams>;
  struct Cell {
    std::size_t writer = 0;  // a stream
    uint64_t written = 0;    // its call
    Clock read{};
  };
  struct Buffer {
    int* begin = nullptr;
    std::vector<int> model;
    std::array<Cell, length> cells{};  // shortest pieces that are copied
  };
  struct Range {
    Buffer* buffer;
    std::size_t first, count;  // cells
  };

  std::size_t number(std::size_t below) { return random_() % below; }
  bool chance(int percent) { return number(100) < static_cast<std::size_t>(percent); }
  Range range(std::array<Buffer, buffers>& among, std::size_t count);
  int* at(const Range& range) const { return range.buffer->begin + range.first * cell_ints_; }
  int* model(const Range& range) const { return range.buffer->model.data() + range.first * cell_ints_; }
  std::size_t ints(const Range& range) const { return range.count * cell_ints_; }
  std::size_t bytes(const Range& range) const { return ints(range) * sizeof(int); }

  void step();
  void copy();
  void copy_pageable();
  void fill();
  void launch();
  void reduce();
  void write_by_host();
  void read_by_host();
  void order_streams();
  void wait();
  void hold_up();
  void open_gates();

  // Before a call on the stream that reads and writes there: all is ordered that has to be. Behind it.
  void order(std::size_t stream, const std::vector<Range>& reads, const std::vector<Range>& writes);
  void note(std::size_t stream, const std::vector<Range>& reads, const std::vector<Range>& writes);
  std::vector<std::size_t> unordered(const Clock& clock, const std::vector<Range>& reads,
                                     const std::vector<Range>& writes) const;
  void wait_for(const std::vector<std::size_t>& which);
  void wait_for_stream(std::size_t stream);
  void wait_for_all();
  void wait_in_stream(std::size_t waits, std::size_t stream);
  void compare(const int* seen, const int* expected, std::size_t count, const char* what);
  [[nodiscard]] std::string name(const Range& range) const;
  void say(const std::string& text);

  const CopyPlatform platform_;
  const std::size_t cell_ints_;
  std::mt19937 random_;
  std::array<Buffer, buffers> device_, pinned_;
  std::array<cudaStream_t, streams> streams_{};
  std::array<cudaEvent_t, streams> events_{};
  std::array<Clock, streams> clocks_{};  // what is over before the stream's next call
  Clock host_{}, calls_{};               // known to be over; made
  int* flags_ = nullptr;                 // of gates
  std::size_t next_gate_ = 0;
  std::vector<int*> closed_;
  std::string program_, difference_;
};
