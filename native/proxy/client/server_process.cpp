#include "proxy/client/server_process.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "ground/environment.h"

extern char** environ;

namespace jitckpt::proxy::client {
namespace {

// Beside this library, unless somebody says otherwise.
std::string program() {
  if (const char* path = read(environment::proxy_server)) return path;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&program), &info) == 0 || !info.dli_fname)
    throw std::runtime_error("The device proxy's server can't be found: set JITCKPT_PROXY_SERVER.");
  const std::string library = info.dli_fname;
  return library.substr(0, library.rfind('/') + 1) + "jitckpt-proxy-server";
}

std::vector<std::string> make_environment() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text = *variable;
    if (!text.starts_with("LD_PRELOAD=") && !text.starts_with("LD_LIBRARY_PATH="))
      variables.emplace_back(text);
  }
  if (const char* libraries = read(environment::proxy_preload))
    variables.push_back(std::string("LD_PRELOAD=") + libraries);
  if (const char* folders = read(environment::proxy_library_path))
    variables.push_back(std::string("LD_LIBRARY_PATH=") + folders);
  return variables;
}

// Ours, with the server's own libraries in the place of the client's. As it was when the first server was
// started: the program may be changing it when another one is.
const std::vector<std::string>& server_environment() {
  static const std::vector<std::string> environment = make_environment();
  return environment;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

// A copy of the file whose number is none of those that the server expects: dup2 onto itself would leave it
// closed on exec.
class HighCopy {
 public:
  explicit HighCopy(int file) : number_(fcntl(file, F_DUPFD_CLOEXEC, wire::pinned_file + 1)) {
    if (number_ < 0) throw std::runtime_error(std::strerror(errno));
  }
  ~HighCopy() { close(number_); }
  HighCopy(const HighCopy&) = delete;
  HighCopy& operator=(const HighCopy&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// As a child of this process.
pid_t spawn(const std::string& path, int socket_file, int log_file, int pinned_file) {
  const HighCopy socket(socket_file), log(log_file), pinned(pinned_file);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, socket.number(), wire::socket_file);
  posix_spawn_file_actions_adddup2(&actions, log.number(), wire::log_file);
  posix_spawn_file_actions_adddup2(&actions, pinned.number(), wire::pinned_file);
  // Nothing else of ours: a socket that it kept open would hide the worker's death from its agent.
  posix_spawn_file_actions_addclosefrom_np(&actions, wire::pinned_file + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<std::string> variables = server_environment();
  std::vector<std::string> words = {path, std::to_string(getpid())};
  pid_t process = -1;
  const int error = posix_spawn(&process, path.c_str(), &actions, &attributes, pointers(words).data(),
                                pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error(std::strerror(error));
  return process;
}

}  // namespace

ServerProcess::ServerProcess(int log_file, int pinned_file) {
  const std::string path = program();
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
    throw std::runtime_error(std::string("The device proxy can't start its server: ") + std::strerror(errno) +
                             ".");
  socket_ = sockets[0];
  try {
    start(path, sockets[1], log_file, pinned_file);
  } catch (const std::exception& error) {
    close(sockets[0]);
    close(sockets[1]);
    throw std::runtime_error("The device proxy can't start its server " + path + ": " + error.what() + ".");
  }
  close(sockets[1]);
}

void ServerProcess::start(const std::string& path, int socket, int log, int pinned) {
  if (AgentStarter* const agent = AgentStarter::of_process()) {
    if (const auto started = agent->start(path, server_environment(), socket, log, pinned)) {
      agent_ = agent;
      process_ = started->process;
      process_file_ = started->process_file;
      return;
    }
  }
  process_ = spawn(path, socket, log, pinned);
  process_file_ = static_cast<int>(syscall(SYS_pidfd_open, process_, 0));
}

void ServerProcess::wait_until_ready() {
  wire::ServerGreeting greeting;
  ssize_t bytes;
  do {
    bytes = recv(socket_, &greeting, sizeof greeting, 0);
  } while (bytes < 0 && errno == EINTR);
  if (bytes != sizeof greeting)
    throw std::runtime_error("The device proxy's server " + end() + " before it was ready.");
  if (greeting.table_hash != table_hash) {
    throw std::runtime_error(
        "The device proxy's server knows other calls than its client: they are of different versions. "
        "Install "
        "jitckpt again.");
  }
  greeting.text[sizeof greeting.text - 1] = '\0';
  if (!greeting.ready) throw std::runtime_error(greeting.text);
}

std::vector<ncclUniqueId> ServerProcess::make_ids(std::size_t count) {
  std::vector<ncclUniqueId> ids(count);
  if (count > 0) say(static_cast<uint32_t>(count));
  for (ncclUniqueId& id : ids) {
    if (recv(socket_, &id, sizeof id, MSG_TRUNC) != sizeof id)
      throw std::runtime_error("The device proxy's server " + end() + " before it had made ids for NCCL.");
  }
  return ids;
}

void ServerProcess::load(const std::string& path) {
  wire::Load order{wire::load, {}};
  if (path.size() >= sizeof order.path) return;
  path.copy(order.path, path.size());
  send(socket_, &order, sizeof order.word + path.size() + 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void ServerProcess::begin() { say(wire::begin); }

bool ServerProcess::do_order(const wire::ServerOrder& order, std::chrono::milliseconds within) {
  send(socket_, &order, sizeof order, MSG_NOSIGNAL);
  pollfd news{socket_, POLLIN, 0};
  uint32_t said = 0;
  return poll(&news, 1, static_cast<int>(within.count())) == 1 &&
         recv(socket_, &said, sizeof said, 0) == sizeof said && said == order.word;
}

bool ServerProcess::reset(std::chrono::milliseconds within, bool keeps_memory) {
  return do_order({keeps_memory ? wire::reset_but_memory : wire::reset, 0, 0}, within);
}

std::optional<wire::Rested> ServerProcess::rest(std::chrono::milliseconds within) {
  return rested(wire::rest, within);
}

std::optional<wire::Rested> ServerProcess::settle(std::chrono::milliseconds within) {
  return rested(wire::settle, within);
}

// What it has still to say to an earlier order, that was waited for in vain, is no answer.
std::optional<wire::Rested> ServerProcess::rested(uint32_t word, std::chrono::milliseconds within) {
  const wire::ServerOrder order{word, 0, 0};
  send(socket_, &order, sizeof order, MSG_NOSIGNAL);
  wire::Rested said{};
  do {
    pollfd news{socket_, POLLIN, 0};
    if (poll(&news, 1, static_cast<int>(within.count())) != 1 ||
        recv(socket_, &said, sizeof said, 0) != sizeof said)
      return std::nullopt;
  } while (said.word == wire::settle && word != wire::settle);
  if (said.word != word) return std::nullopt;
  return said;
}

bool ServerProcess::finish(uint64_t step, std::chrono::milliseconds within) {
  return do_order({wire::finish, step, 0}, within);
}

bool ServerProcess::copy_state(const wire::Range* ranges, std::size_t count,
                               std::chrono::milliseconds within) {
  return do_order({wire::copy_state, reinterpret_cast<uint64_t>(ranges), count}, within);
}

// If the server is dead, whoever waits for it finds that out.
void ServerProcess::say(uint32_t word) { send(socket_, &word, sizeof word, MSG_NOSIGNAL); }

// By its file: the number may be another process's by now.
void ServerProcess::kill() { syscall(SYS_pidfd_send_signal, process_file_, SIGKILL, nullptr, 0); }

void ServerProcess::watch_no_more() {
  if (process_file_ >= 0) close(process_file_);
  process_file_ = -1;
}

// The number may be another process's by now: but not as long as the server, which alone has the other end of
// the socket, has not ended.
void ServerProcess::watch_again() {
  if (process_file_ >= 0) return;
  process_file_ = static_cast<int>(syscall(SYS_pidfd_open, process_, 0));
  if (has_hung_up()) watch_no_more();
}

bool ServerProcess::has_hung_up() const {
  pollfd state{socket_, 0, 0};
  return poll(&state, 1, 0) != 0;
}

ServerProcess::~ServerProcess() { stop(); }

void ServerProcess::stop() {
  if (process_ < 0) return;
  const bool was_watched = process_file_ >= 0;
  close(socket_);
  // It ends by itself, now that nobody listens; if it can't, it is stuck in the device's driver.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (was_watched && alive() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (was_watched && alive()) kill();
  if (!agent_) exit_status();
  if (process_file_ >= 0) close(process_file_);
  process_ = -1;
}

void ServerProcess::forget() {
  close(socket_);
  watch_no_more();
  process_ = -1;
}

bool ServerProcess::alive() const {
  if (process_file_ < 0) return !has_hung_up();
  pollfd state{process_file_, POLLIN, 0};
  return poll(&state, 1, 0) == 0;
}

int ServerProcess::exit_status() const {
  // If the program has a way of its own to wait for all its children, the status is lost.
  if (!reaped_ && waitpid(process_, &status_, 0) != process_) status_ = -1;
  reaped_ = true;
  return status_;
}

std::string ServerProcess::end() const {
  const std::string who = "(process " + std::to_string(process_) + ") ";
  if (agent_) {
    pollfd ended{process_file_, POLLIN, 0};
    while (process_file_ >= 0 && poll(&ended, 1, -1) < 0 && errno == EINTR) {
    }
    return who + agent_->end_of(process_);
  }
  const int status = exit_status();
  if (status != -1 && WIFSIGNALED(status)) return who + "was ended by " + strsignal(WTERMSIG(status));
  if (status != -1 && WIFEXITED(status))
    return who + "ended with status " + std::to_string(WEXITSTATUS(status));
  return who + "ended";
}

}  // namespace jitckpt::proxy::client
