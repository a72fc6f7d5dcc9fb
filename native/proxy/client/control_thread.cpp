#include "proxy/client/control_thread.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/unix_socket.h"

namespace jitckpt::proxy::client {
namespace {

uint64_t microseconds(std::chrono::steady_clock::duration time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

int connect_to_agent(const std::string& path) {
  const int made = connect_to(path);
  if (made < 0)
    throw std::runtime_error("The agent can't be reached at JITCKPT_PROXY_CONTROL=" + path + ": " +
                             std::strerror(errno) + ".");
  const int room = 8 << 20;  // for messages that name many communicators
  setsockopt(made, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  return made;
}

std::string hexadecimal(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

// How often to look for hangs, in milliseconds: often enough to find one not much later than it is one.
int looking_time(std::optional<std::chrono::milliseconds> limit) {
  return static_cast<int>(std::clamp<int64_t>(limit ? limit->count() / 8 : 1000, 1, 1000));
}

}  // namespace

ControlThread::ControlThread(Connection& connection, const std::string& path)
    : connection_(connection),
      socket_(connect_to_agent(path)),
      news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      hang_watch_(connection.log()) {
  say(control::Hello{getpid(), control::rank_of_process(), hexadecimal(table_hash)});
  const auto news = [this] {
    const uint64_t one = 1;
    if (write(news_, &one, sizeof one) < 0) return;  // it has news already
  };
  connection_.hold().begin(news);
  connection_.validation().begin(news);
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ControlThread::~ControlThread() {
  ending_ = true;
  connection_.hold().end();
  connection_.validation().hear(Validation::Heard::over);
  const uint64_t one = 1;
  if (write(news_, &one, sizeof one) == sizeof one) thread_.join();
  close(socket_);
  close(news_);
}

void ControlThread::forget() {
  close(socket_);
  close(news_);
}

void ControlThread::run() {
  while (!ending_) {
    const bool looks_often = phase_ == Phase::replaying || phase_ == Phase::settling;
    const bool watches = (phase_ == Phase::watching || looks_often) && !server_known_dead_;
    pollfd news[] = {{socket_, POLLIN, 0},
                     {news_, POLLIN, 0},
                     {watches ? connection_.server_process_file() : -1, POLLIN, 0}};
    // The server says nothing when it is through; a hang says nothing at all.
    poll(news, 3, looks_often ? 1 : looking_time(connection_.hang_time()));
    if (ending_) return;
    uint64_t count = 0;
    while (read(news_, &count, sizeof count) > 0) {
    }
    if (news[0].revents != 0 && !listen()) return;
    if (news[2].revents != 0) look_at_server();
    if (phase_ == Phase::replaying) look_at_replay();
    if (phase_ == Phase::settling) look_at_pause();
    look_for_hangs();
    if (phase_ == Phase::watching && !connection_.hold().held()) connection_.prepare_spare();
    if (phase_ == Phase::settled) continue;  // what fails is said once that is over
    if (const Hold::Failed failed = connection_.hold().take_alarm(); !failed.error.empty()) {
      std::fprintf(stderr, "jitckpt: %s; the program waits until its job has recovered.\n",
                   failed.error.c_str());
      say(control::Alarm{failed.call, failed.error});
      if (phase_ == Phase::replaying || phase_ == Phase::settling)
        phase_ = Phase::watching;  // there will be another recovery
    }
    if (auto said = connection_.validation().take()) say(std::move(*said));
  }
}

bool ControlThread::listen() {
  const ssize_t length = recv(socket_, nullptr, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
  if (length < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  if (length <= 0 || recv(socket_, bytes.data(), bytes.size(), 0) != length) {
    give_up("its agent is gone");
    return false;
  }
  try {
    const auto heard = control::decode_from_agent(bytes);
    if (heard.number < number_) return true;
    const bool newer = heard.number > number_;
    number_ = heard.number;
    const bool stops = std::holds_alternative<control::Stop>(heard.message);
    // What does not begin a recovery belongs to the newest one; said twice, it is done once.
    if (stops == newer || std::holds_alternative<control::GiveUp>(heard.message)) carry_out(heard.message);
  } catch (const control::BadMessage& error) {
    give_up(std::string("its agent has sent what can't be understood: ") + error.what());
  }
  return phase_ != Phase::given_up;
}

void ControlThread::carry_out(const control::FromAgent& order) {
  try {
    if (std::holds_alternative<control::Stop>(order)) {
      connection_.watch_again();
      connection_.hold().stop();
      connection_.freeze();
      phase_ = Phase::held;
      say(control::Held{});
    } else if (std::holds_alternative<control::Rest>(order)) {
      if (phase_ == Phase::held) {
        phase_ = Phase::stopped;
        say(connection_.report());
      }
    } else if (const auto* const restarts = std::get_if<control::Restart>(&order)) {
      if (phase_ == Phase::stopped) restart(*restarts);
    } else if (const auto* const replays = std::get_if<control::Replay>(&order)) {
      if (phase_ == Phase::restarted) replay(*replays);
    } else if (std::holds_alternative<control::Settle>(order)) {
      if (phase_ == Phase::watching) {
        connection_.pause();
        settles_until_ = std::chrono::steady_clock::now() + longest_settling;
        phase_ = Phase::settling;
      }
    } else if (std::holds_alternative<control::GoOn>(order)) {
      if (phase_ == Phase::settled) go_on();
    } else if (std::holds_alternative<control::Ask>(order)) {
      tell_standing();
    } else if (const auto* const validated = std::get_if<control::Validated>(&order)) {
      using enum Validation::Heard;
      connection_.validation().hear_of(validated->place, validated->valid == 0   ? left_out
                                                         : validated->valid == 1 ? valid
                                                                                 : stays);
    } else if (const auto* const gives_up = std::get_if<control::GiveUp>(&order)) {
      give_up(gives_up->text);
    }
  } catch (const std::exception& error) {
    say(control::Alarm{0, error.what()});
  }
}

void ControlThread::restart(const control::Restart& order) {
  const Connection::Restarted restarted = connection_.restart_server(order);
  server_known_dead_ = false;
  const auto began = std::chrono::steady_clock::now() - restarted.starting;
  control::Ids made{connection_.make_ids(), microseconds(restarted.ending), 0, restarted.stays,
                    restarted.copy};
  made.starting_us = microseconds(std::chrono::steady_clock::now() - began);
  phase_ = Phase::restarted;
  say(std::move(made));
}

void ControlThread::replay(const control::Replay& order) {
  replay_began_ = std::chrono::steady_clock::now();
  replay_watch_.begin(replay_began_);
  connection_.replay(number_.recovery, order);
  phase_ = Phase::replaying;
}

void ControlThread::look_at_pause() {
  if (connection_.is_quiet())
    settled(connection_.settle());
  else if (std::chrono::steady_clock::now() > settles_until_)
    settled("calls of its threads come to no end");
}

void ControlThread::settled(const std::string& why_not) {
  phase_ = Phase::settled;
  say(control::Settled{why_not.empty(), why_not});
}

// Nobody has looked meanwhile whether the server lives.
void ControlThread::go_on() {
  phase_ = Phase::watching;
  connection_.watch_again();
  if (connection_.server_is_gone()) look_at_server();
  connection_.go_on_from_pause();
}

void ControlThread::look_at_server() {
  server_known_dead_ = true;
  connection_.hold().alarm("the device proxy's server " + connection_.end_of_server());
}

bool ControlThread::replay_stands_still() {
  const auto longest = connection_.hang_time();
  if (!longest) return false;
  const proxy::ControlBlock& control = connection_.log().control();
  const std::chrono::nanoseconds made(control.made_at[static_cast<std::size_t>(Made::image)]);
  return replay_watch_.stands_still(made > replay_began_.time_since_epoch(), control.read,
                                    connection_.longest_minibatch(), connection_.recoveries(), *longest,
                                    std::chrono::steady_clock::now());
}

void ControlThread::look_at_replay() {
  if (!connection_.replayed()) {
    if (replay_stands_still()) connection_.hold().alarm("the calls that are made again come to no end");
    return;
  }
  if (const std::string failure = connection_.failed_trial(); !failure.empty()) {
    connection_.hold().alarm(failure);
    return;
  }
  // If something has failed in it, the alarm is what the agent hears.
  if (!connection_.release()) return;
  phase_ = Phase::watching;
  using Clock = std::chrono::steady_clock;
  control::Done done{};
  auto since = replay_began_;
  const auto until = [&since](Clock::time_point time) {
    return microseconds(time - std::exchange(since, time));
  };
  const auto until_made = [&](Made made) {
    const auto& made_at = connection_.log().control().made_at;
    return until(Clock::time_point(std::chrono::nanoseconds(made_at[static_cast<std::size_t>(made)])));
  };
  done.handles_us = until_made(Made::handles);
  done.image_us = until_made(Made::image);
  done.communicators_us = until_made(Made::communicators);
  done.replay_us = until(Clock::now());
  done.log_bytes = connection_.writer().most_bytes() + connection_.pinned_reads().most_bytes();
  done.image_bytes = connection_.most_image_bytes();
  say(done);
}

void ControlThread::look_for_hangs() {
  const auto limit = connection_.hang_time();
  if (phase_ != Phase::watching || connection_.hold().held() || !limit) return hang_watch_.forget();
  const auto now = std::chrono::steady_clock::now();
  if (hang_watch_.longest_wait(now) < *limit || now - told_at_ < *limit / 4) return;
  told_at_ = now;
  tell_standing();
}

void ControlThread::tell_standing() {
  say(connection_.standing(hang_watch_.longest_wait(std::chrono::steady_clock::now())));
}

void ControlThread::give_up(const std::string& why) {
  phase_ = Phase::given_up;
  // What an agent says is a sentence.
  std::fprintf(stderr, "jitckpt: this process can't recover from failures any more: %s%s\n", why.c_str(),
               why.ends_with('.') ? "" : ".");
  connection_.give_up(why);
}

void ControlThread::say(const control::FromWorker& message) {
  const auto bytes = control::encode({number_, message});
  // An agent that does not listen is noticed when it is to be heard.
  send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace jitckpt::proxy::client
