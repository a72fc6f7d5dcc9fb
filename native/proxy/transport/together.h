// The step barrier of a job: memory that the agent of a host has made and its ranks' servers share. It begins
// with a head, then has a word for each rank of the host, each on a line of its own. Where there are several
// hosts, their agents tell each other when all ranks of theirs have come (jitckpt/decisions/step_tree.py).
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace jitckpt::proxy {

class Together {
 public:
  // What JITCKPT_PROXY_TOGETHER names: a file and, behind '#', which of its ranks this process is; null if
  // there is none. Throws std::runtime_error with a sentence if it can't be that.
  static std::unique_ptr<Together> of_environment();
  // rank: of the host's, counted from 0, or `agent`.
  Together(const std::string& path, uint64_t rank);
  ~Together();
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;

  // The rank is ready for the step, after so many recoveries of the job.
  void come(uint64_t recovery, uint64_t step);
  // Whether all ranks are.
  bool all_have_come(uint64_t recovery, uint64_t step) const;
  // A rank, whose newest image is of that step, wants the state in images again. All ranks do it in the same
  // step, before which each hears of it: none comes to the next but one before this rank comes to the next.
  void leave_after(uint64_t step);
  // The first step whose image has the state; 0: none is known.
  uint64_t whole_from() const;
  // A rank does not wait for the others any more, nor need they for it.
  void leave();
  bool has_been_left() const;
  // Returns when something has happened that this rank may wait for, at the latest after the time, or for no
  // reason. seen: what `happenings` had returned before the caller looked. Of the others' coming only the
  // last counts: in each step a server is woken by its own client and by that.
  uint32_t happenings() const;
  void wait(uint32_t seen, std::chrono::milliseconds longest) const;
  // Something has happened in this rank's client.
  void notify() { wake(rank_); }

  // For the agent, of several hosts; what it waits for is that all ranks of this host have come, or want to
  // leave. The ranks of some hosts, what they have all come to: a recovery and a step in one number, which
  // only grows; 0 for none, or if they are of different recoveries.
  struct Come {
    uint64_t recovery_and_step = 0;
    uint64_t whole_from = 0;
    bool left = false;
    bool operator==(const Come&) const = default;
  };
  Come here() const;
  // Those of all hosts have come to that.
  void everywhere(const Come& come);

  static constexpr uint64_t magic = 0x32474f544b50434a;  // "JCPKTOG2" as little-endian bytes
  static constexpr uint64_t agent = ~uint64_t{0};
  static constexpr int step_bits = 40;

 private:
  struct Head {
    uint64_t magic, ranks, hosts;
    std::atomic<uint32_t> left;
    std::atomic<uint64_t> whole_from;
    std::atomic<uint64_t> everywhere;
    std::atomic<uint32_t> agents_happenings;
  };
  struct alignas(64) Word {
    std::atomic<uint64_t> recovery_and_step;
    std::atomic<uint32_t> happenings;
  };
  static constexpr std::size_t words_begin = 4096;

  std::atomic<uint32_t>& happenings_of(uint64_t rank) const {
    return rank == agent ? head().agents_happenings : words()[rank].happenings;
  }
  void wake(uint64_t rank);
  void wake_all();
  bool all_here_have_come(uint64_t recovery_and_step) const;
  static uint64_t joined(uint64_t recovery, uint64_t step) { return recovery << step_bits | step; }
  bool all_have_come(uint64_t recovery_and_step) const;
  Head& head() const { return *reinterpret_cast<Head*>(begin_); }
  Word* words() const { return reinterpret_cast<Word*>(begin_ + words_begin); }
  std::byte* begin_ = nullptr;
  std::size_t bytes_ = 0;
  uint64_t rank_;
};

}  // namespace jitckpt::proxy
