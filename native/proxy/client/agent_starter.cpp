#include "proxy/client/agent_starter.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "ground/environment.h"
#include "proxy/client/unix_socket.h"
#include "proxy/transport/shared_file.h"

namespace jitckpt::proxy::client {
namespace {

constexpr timeval longest_answer{60, 0};  // an agent that says nothing for so long is as good as gone

AgentStarter* connected() {
  const char* const path = read(environment::proxy_servers);
  const int socket = path ? connect_to(path) : -1;
  if (socket < 0) return nullptr;
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &longest_answer, sizeof longest_answer);
  return new AgentStarter(socket);
}

std::atomic<AgentStarter*>& of_this_process() {
  static std::atomic<AgentStarter*> starter{connected()};  // never destroyed: threads outlive main()
  return starter;
}

// Where this process writes to, or nowhere.
int output(int file) {
  return fcntl(file, F_GETFD) < 0 ? open("/dev/null", O_WRONLY | O_CLOEXEC) : fcntl(file, F_DUPFD_CLOEXEC, 3);
}

// One text behind the other, each with its end: an environment has no limit that a message could have.
std::unique_ptr<SharedFile> written(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all.append(text).push_back('\0');
  auto file = std::make_unique<SharedFile>("jitckpt-environment", all.size());
  for (std::size_t at = 0; at < all.size();) {
    const ssize_t bytes =
        pwrite(file->descriptor(), all.data() + at, all.size() - at, static_cast<off_t>(at));
    if (bytes < 0 && errno != EINTR) throw std::runtime_error(std::strerror(errno));
    at += static_cast<std::size_t>(std::max<ssize_t>(bytes, 0));
  }
  return file;
}

}  // namespace

// file: that came with it; -1: none.
struct AgentStarter::Answer {
  std::string text;
  int file;
};

AgentStarter* AgentStarter::of_process() { return of_this_process(); }

void AgentStarter::forget() {
  if (AgentStarter* const starter = of_this_process().exchange(nullptr)) close(starter->socket_);
}

AgentStarter::~AgentStarter() { close(socket_); }

std::optional<StartedServer> AgentStarter::start(const std::string& program,
                                                 const std::vector<std::string>& environment, int socket,
                                                 int log, int pinned) {
  if (gone_) return std::nullopt;
  const auto variables = written(environment);
  const int out = output(STDOUT_FILENO), error = output(STDERR_FILENO);
  std::optional<Answer> answer;
  if (out >= 0 && error >= 0)
    answer = ask("start " + program, {out, error, socket, log, pinned, variables->descriptor()});
  close(out);
  close(error);
  if (!answer) return std::nullopt;
  int process = 0;
  if (answer->file >= 0 && std::sscanf(answer->text.c_str(), "started %d", &process) == 1)
    return StartedServer{process, answer->file};
  if (answer->file >= 0) close(answer->file);
  throw std::runtime_error(answer->text);
}

std::string AgentStarter::end_of(pid_t process) {
  const std::optional<Answer> answer = ask("end " + std::to_string(process), {});
  if (!answer) return "ended";
  if (answer->file >= 0) close(answer->file);
  return answer->text;
}

std::optional<AgentStarter::Answer> AgentStarter::ask(const std::string& question,
                                                      const std::vector<int>& files) {
  std::lock_guard lock(mutex_);
  if (gone_) return std::nullopt;
  iovec text{const_cast<char*>(question.data()), question.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(6 * sizeof(int))> given{};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = given.data();
    message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), files.data(), files.size() * sizeof(int));
  }
  std::array<char, 4096> words{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> taken{};
  ssize_t bytes = sendmsg(socket_, &message, MSG_NOSIGNAL);
  if (bytes > 0) {
    iovec room{words.data(), words.size()};
    message = {};
    message.msg_iov = &room;
    message.msg_iovlen = 1;
    message.msg_control = taken.data();
    message.msg_controllen = taken.size();
    do {
      bytes = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    } while (bytes < 0 && errno == EINTR);
  }
  if (bytes <= 0) {
    gone_ = true;  // what it says later belongs to no question
    return std::nullopt;
  }
  Answer answer{std::string(words.data(), static_cast<std::size_t>(bytes)), -1};
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
    std::memcpy(&answer.file, CMSG_DATA(header), sizeof(int));
  return answer;
}

}  // namespace jitckpt::proxy::client
