#include "proxy/tests/coordinator.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "proxy/transport/together.h"

using jitckpt::proxy::no_key;

std::string temporary_folder(const std::string& prefix) {
  const std::filesystem::path all = std::filesystem::temp_directory_path();
  for (const auto& entry : std::filesystem::directory_iterator(all)) {
    const std::string name = entry.path().filename();
    if (name.rfind(prefix, 0) != 0) continue;
    const int owner = std::atoi(name.c_str() + prefix.size());
    std::error_code gone;  // another test may remove it, too
    if (owner > 0 && kill(owner, 0) != 0 && errno == ESRCH) std::filesystem::remove_all(entry.path(), gone);
  }
  std::string folder = all / (prefix + std::to_string(getpid()) + "-XXXXXX");
  if (!mkdtemp(folder.data())) throw std::runtime_error("no temporary folder");
  return folder;
}

Coordinator::Coordinator(int ranks) : ranks_(ranks), folder_(temporary_folder("jitckpt-ranks-")) {
  path_ = folder_ + "/agent";
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  path_.copy(address.sun_path, sizeof address.sun_path - 1);
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener_, ranks) != 0)
    throw std::runtime_error(std::strerror(errno));
  end_ = eventfd(0, EFD_CLOEXEC);
  together_ = memfd_create("jitckpt-together", MFD_CLOEXEC);
  const uint64_t head[] = {jitckpt::proxy::Together::magic, static_cast<uint64_t>(ranks), 1};
  if (ftruncate(together_, 4096 + 64 * ranks) != 0 || pwrite(together_, head, sizeof head, 0) != sizeof head)
    throw std::runtime_error(std::strerror(errno));
}

std::string Coordinator::together() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(together_);
}

void Coordinator::start() {
  thread_ = std::thread([this] { run(); });
}

Coordinator::~Coordinator() {
  const uint64_t one = 1;
  if (thread_.joinable() && write(end_, &one, sizeof one) == sizeof one) thread_.join();
  for (const auto& [rank, worker] : workers_) close(worker.socket);
  close(listener_);
  close(end_);
  close(together_);
  std::filesystem::remove_all(folder_);
}

std::vector<Coordinator::Recovery> Coordinator::recoveries() const {
  std::lock_guard lock(mutex_);
  return recoveries_;
}

std::pair<int, int> Coordinator::compared() const {
  std::lock_guard lock(mutex_);
  return {collectives_, pairs_};
}

std::string Coordinator::complaint() const {
  std::lock_guard lock(mutex_);
  return complaint_;
}

void Coordinator::run() {
  std::vector<std::byte> bytes(1 << 20);
  for (;;) {
    std::vector<pollfd> news{{end_, POLLIN, 0}, {listener_, POLLIN, 0}};
    std::vector<int> ranks;
    for (const auto& [rank, worker] : workers_) {
      if (worker.socket < 0) continue;
      news.push_back({worker.socket, POLLIN, 0});
      ranks.push_back(rank);
    }
    poll(news.data(), news.size(), -1);
    std::lock_guard lock(mutex_);
    if (news[0].revents != 0) return;
    if (news[1].revents != 0) {
      const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const ssize_t length = recv(socket, bytes.data(), bytes.size(), 0);
      const auto hello =
          control::decode_from_worker(std::span(bytes).first(static_cast<std::size_t>(length)));
      const auto& said = std::get<control::Hello>(hello.message);
      workers_[said.rank] = {socket, said.process, false, {}, {}, {}};
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (news[i + 2].revents == 0) continue;
      Worker& worker = workers_.at(ranks[i]);
      const ssize_t length = recv(worker.socket, bytes.data(), bytes.size(), 0);
      if (length <= 0) {
        close(worker.socket);
        worker.socket = -1;
        // At the end of the program it is right, in a recovery it is not.
        if (phase_ != Phase::watching && phase_ != Phase::over)
          give_up("rank " + std::to_string(ranks[i]) + " is gone");
        continue;
      }
      try {
        hear(ranks[i], control::decode_from_worker(std::span(bytes).first(static_cast<std::size_t>(length))));
      } catch (const std::exception& error) {
        give_up(error.what());
      }
    }
  }
}

bool Coordinator::all_answered() const {
  return std::ranges::all_of(workers_, [](const auto& one) { return one.second.answered; });
}

void Coordinator::hear(int rank, const control::Numbered<control::FromWorker>& message) {
  if (message.number != number_) return;
  Worker& worker = workers_.at(rank);
  if (std::holds_alternative<control::Alarm>(message.message)) {
    if (phase_ != Phase::holding && phase_ != Phase::stopping && phase_ != Phase::over)
      begin_recovery(phase_ == Phase::watching);
    return;
  }
  if (const auto* const standing = std::get_if<control::Standing>(&message.message)) {
    if (phase_ == Phase::watching && standing->waited_us >= standing->limit_us) begin_recovery(false);
    return;
  }
  if (const auto* const validates = std::get_if<control::Validates>(&message.message)) {
    validates_[rank] = *validates;
    if (static_cast<int>(validates_.size()) == ranks_) validate();
    return;
  }
  if (const auto* const report = std::get_if<control::Stopped>(&message.message)) worker.report = *report;
  if (const auto* const made = std::get_if<control::Ids>(&message.message)) {
    ids_.insert(ids_.end(), made->ids.begin(), made->ids.end());
    if (made->stays) recoveries_.back().stayed.insert(rank);
    worker.copy = made->copy;
    // What was to stay on its device is gone.
    if (!made->stays && (worker.way == "in place" || worker.way == "finish")) return begin_recovery(false);
  }
  worker.answered = true;
  if (!all_answered()) return;
  if (phase_ == Phase::holding) {
    if (gives_up_held) return give_up("a test wants it so");
    phase_ = Phase::stopping;
    for (auto& [other, one] : workers_) {
      one.answered = false;
      say(other, control::Rest{});
    }
  } else if (phase_ == Phase::stopping) {
    stopped();
  } else if (phase_ == Phase::restarting) {
    restarted();
  } else if (phase_ == Phase::replaying) {
    phase_ = Phase::watching;
    recoveries_.back().done = true;
  }
}

// All have said where they stand: 0 or 1, to make their calls again.
void Coordinator::validate() {
  if (std::ranges::any_of(validates_, [](const auto& one) { return one.second.says < 2; })) {
    begin_recovery(true);
    recoveries_.back().validates = true;
    return;
  }
  for (const auto& [rank, validates] : std::exchange(validates_, {}))
    say(rank, control::Validated{validates.place, 1});
}

void Coordinator::begin_recovery(bool may_stay) {
  may_stay_ = may_stay;
  validates_.clear();
  ++number_.recovery;
  recoveries_.emplace_back();
  if (gives_up) return give_up("a test wants it so");
  if (!instead.empty()) {
    for (const auto& [rank, worker] : workers_) send(worker.socket, instead.data(), instead.size(), 0);
    phase_ = Phase::over;
    return;
  }
  if (static_cast<int>(workers_.size()) < ranks_) return give_up("not all ranks are there");
  phase_ = Phase::holding;
  for (auto& [rank, worker] : workers_) {
    worker.answered = false;
    say(rank, control::Stop{});
  }
}

// As `way` of jitckpt/decisions/transparent/decision.py.
std::string Coordinator::way(const control::Stopped& report, uint64_t state) {
  const bool healthy = report.device == control::DeviceState::healthy, holds = report.begun == report.ended;
  if (state < report.kept_from || state > report.kept_to) return "";
  if (report.images >> (state - report.kept_from) & 1) return "image";
  const bool works = healthy || report.device == control::DeviceState::changed;
  if (works && report.ended + 1 == state && report.ready == state && holds) return "finish";
  if (healthy && holds && report.ended == state) return "in place";
  if (report.copies >> (state - report.kept_from) & 1) return "host copy";
  return report.device == control::DeviceState::suspect && holds && report.ended == state ? "through the host"
                                                                                          : "";
}

void Coordinator::stopped() {
  uint64_t newest = 0;
  std::set<uint64_t> common;
  for (const auto& [rank, worker] : workers_) {
    const control::Stopped& report = worker.report;
    std::set<uint64_t> kept;
    if (report.kept_from <= report.kept_to) kept = {report.kept_from, report.kept_to};
    if (!kept.empty()) newest = std::max(newest, *kept.rbegin());
    if (rank == workers_.begin()->first) common = kept;
    std::erase_if(common, [&](uint64_t state) { return !kept.contains(state); });
  }
  // All ranks are replicas of each other, but an image does for its own rank alone.
  std::erase_if(common, [&](uint64_t state) {
    const auto any = [&](const auto& is) {
      return std::ranges::any_of(workers_,
                                 [&](const auto& one) { return is(way(one.second.report, state)); });
    };
    const bool some_lack = any([](const std::string& found) { return found.empty(); });
    return some_lack && !any([](const std::string& found) { return !found.empty() && found != "image"; });
  });
  if (common.empty()) return give_up("the ranks have no state in common");
  recoveries_.back().state = state_ = *common.rbegin();
  recoveries_.back().newest = newest;
  compare_counts();
  phase_ = Phase::restarting;
  ids_.clear();
  const bool some_lack =
      std::ranges::any_of(workers_, [&](const auto& one) { return way(one.second.report, state_).empty(); });
  for (auto& [rank, worker] : workers_) {
    worker.answered = false;
    worker.copy.clear();
    worker.way = way(worker.report, state_);
    recoveries_.back().ways[rank] = worker.way.empty() ? "from a replica" : worker.way;
  }
  for (auto& [rank, worker] : workers_) {
    const bool finishes = worker.way == "finish", stays = finishes || worker.way == "in place";
    const bool copies = !worker.way.empty() && (some_lack || !stays);
    before_restart(rank, worker.process);
    say(rank, control::Restart{may_stay_ || stays, finishes ? state_ : 0, copies ? state_ : 0});
  }
}

// What one rank had sent another when the state began, that one had received.
void Coordinator::compare_counts() {
  std::map<jitckpt::proxy::Key, std::map<std::pair<int, int>, std::set<uint64_t>>> exchanged;
  for (const auto& [rank, worker] : workers_) {
    for (const control::Membership& one : worker.report.communicators) {
      for (const control::Count& count : one.counts) {
        if (count.state != state_) continue;
        const bool collective = count.peer == control::everybody;
        if (collective || count.sent > 0)
          exchanged[one.key][{collective ? count.peer : one.rank, count.peer}].insert(count.sent);
        if (count.received > 0) exchanged[one.key][{count.peer, one.rank}].insert(count.received);
      }
    }
  }
  for (const auto& [key, counts] : exchanged) {
    for (const auto& [pair, found] : counts) {
      if (found.size() > 1) complaint_ = "ranks differ in what they have exchanged before a state";
      ++(pair.first == control::everybody ? collectives_ : pairs_);
    }
  }
}

// Of a rank: those that the communicators of all others say that it has to make, splits after what they are
// split from.
std::vector<control::Making> Coordinator::creations(int rank, uint64_t state) const {
  const auto of = [state](const Worker& worker) {
    std::vector<control::Membership> all;
    for (const control::Membership& one : worker.report.communicators) {
      if (one.since <= state && state <= one.until) all.push_back(one);
    }
    return all;
  };
  const std::vector<control::Membership> mine = of(workers_.at(rank));
  const auto in = [&](const jitckpt::proxy::Key& key) {
    return std::ranges::any_of(mine, [&](const control::Membership& one) { return one.key == key; });
  };
  std::set<jitckpt::proxy::Key> known{};
  for (const auto& [other, worker] : workers_) {
    for (const control::Membership& one : of(worker)) known.insert(one.key);
  }
  // By depth (no split of a split here), parent and split, so that all ranks have one order.
  std::map<std::tuple<bool, jitckpt::proxy::Key, uint32_t>, control::Making> calls;
  for (const auto& [other, worker] : workers_) {
    for (const control::Membership& one : of(worker)) {
      const bool is_split = known.contains(one.parent);
      if (!in(is_split ? one.parent : one.key)) continue;
      auto& call = calls[{is_split, is_split ? one.parent : one.key, one.split}];
      call.parent = is_split ? one.parent : no_key;
      call.split = one.split;
      if (in(one.key)) call.key = one.key;
    }
  }
  std::vector<control::Making> order;
  for (const auto& [place, call] : calls) order.push_back(call);
  return order;
}

void Coordinator::restarted() {
  phase_ = Phase::replaying;
  std::map<int, std::pair<uint64_t, std::string>> failed;
  for (auto& [rank, worker] : workers_) {
    worker.answered = false;
    failed[rank] = {worker.report.failed_call, worker.report.error};
    const bool own = failed[rank].first != 0 && failed[rank] == failed_before_[rank];
    recoveries_.back().delivered += own;
    if (own) before_delivery(worker.process);
    const bool in_place = worker.way == "finish" || worker.way == "in place";
    std::vector<control::HostCopy> source = worker.copy;
    for (const auto& [other, giver] : workers_) {
      if (source.empty()) source = giver.copy;
    }
    if (in_place) source.clear();
    say(rank, control::Replay{state_, own, recoveries_.back().validates, in_place, source, ids_,
                              creations(rank, state_)});
    before_replay(rank, worker.process);
  }
  failed_before_ = failed;
}

void Coordinator::give_up(const std::string& why) {
  phase_ = Phase::over;
  complaint_ = why;
  for (const auto& [rank, worker] : workers_) say(rank, control::GiveUp{why});
}

void Coordinator::say(int rank, const control::FromAgent& message) {
  const auto bytes = control::encode({number_, message});
  send(workers_.at(rank).socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}
