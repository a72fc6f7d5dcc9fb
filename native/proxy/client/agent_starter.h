// The agent as the one that starts this process's servers: they are its children then, not the program's. So
// a program that waits for all its children waits for no server, and one that is moved to another host leaves
// its server behind. docs/how-it-works/proxy.md has what is said over the socket.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace jitckpt::proxy::client {

struct StartedServer {
  pid_t process;
  int process_file;
};

class AgentStarter {
 public:
  // Of this process. Null if there is no agent, or it does not listen (any more), or not to this process.
  static AgentStarter* of_process();
  // Those of a forked child's parent are none of its own.
  static void forget();

  explicit AgentStarter(int socket) : socket_(socket) {}  // connected
  ~AgentStarter();
  AgentStarter(const AgentStarter&) = delete;
  AgentStarter& operator=(const AgentStarter&) = delete;

  // Starts the program, with the environment's NAME=VALUE and with these files as 3, 4 and 5. Nothing if the
  // agent is not there any more. Throws std::runtime_error with the reason if the program can't be started.
  std::optional<StartedServer> start(const std::string& program, const std::vector<std::string>& environment,
                                     int socket, int log, int pinned);
  // How one has ended, which it has, as the end of a sentence.
  std::string end_of(pid_t process);

 private:
  struct Answer;
  std::optional<Answer> ask(const std::string& question, const std::vector<int>& files);

  int socket_;
  std::atomic<bool> gone_{false};
  std::mutex mutex_;
};

}  // namespace jitckpt::proxy::client
