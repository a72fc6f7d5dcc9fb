// The server as a process: started by the agent or, where there is none, by the client; ended with it.
#pragma once
#include <nccl.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "proxy/client/agent_starter.h"
#include "proxy/wire.h"

namespace jitckpt::proxy::client {

class ServerProcess {
 public:
  // Starts the server with these files; it reads the log from `begin` on. Throws std::runtime_error with a
  // sentence.
  ServerProcess(int log_file, int pinned_file);
  // Ends it.
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // Until it says that it is ready, before all else. Throws std::runtime_error with a sentence.
  void wait_until_ready();
  // Before `begin`: has it load a library that it will need. Does not wait for that.
  void load(const std::string& path);
  // Before `begin`: new ids of NCCL, which the server listens for. Throws std::runtime_error.
  std::vector<ncclUniqueId> make_ids(std::size_t count);
  void begin();
  // After `begin`: the server stops and drops what it has made, so that it is as it was before. False if it
  // can't, or does not within this time.
  bool reset(std::chrono::milliseconds within, bool keeps_memory);
  // The server stops, and says what its device holds; nothing if it does not within this time. After that it
  // does what it is told, until it is reset.
  std::optional<wire::Rested> rest(std::chrono::milliseconds within);
  bool finish(uint64_t step, std::chrono::milliseconds within);
  bool copy_state(const wire::Range* ranges, std::size_t count, std::chrono::milliseconds within);
  // While it has no record to read: it says what its device holds once that has nothing to do, and goes on
  // afterwards. Nothing if it does not within this time.
  std::optional<wire::Rested> settle(std::chrono::milliseconds within);
  void kill();
  // This process has no file that stands for the server, until it is watched again: as in its image, which
  // has no more than a socket whose other end is gone.
  void watch_no_more();
  void watch_again();
  // Whether it is one that an image of this process can do without.
  bool is_of_agent() const { return agent_ != nullptr; }

  pid_t id() const { return process_; }
  bool alive() const;
  int process_file() const { return process_file_; }
  // Whether its process number may be another's by now.
  bool has_ended() const { return agent_ ? !alive() : reaped_; }
  // How it ended, as the end of a sentence.
  std::string end() const;

  // In a forked child: the server is the parent's.
  void forget();

 private:
  void stop();
  void say(uint32_t word);
  void start(const std::string& path, int socket, int log, int pinned);
  bool do_order(const wire::ServerOrder& order, std::chrono::milliseconds within);
  std::optional<wire::Rested> rested(uint32_t word, std::chrono::milliseconds within);
  bool has_hung_up() const;
  int exit_status() const;

  pid_t process_ = -1;
  int socket_ = -1, process_file_ = -1;
  AgentStarter* agent_ = nullptr;  // who has started it; null: this process
  mutable int status_ = 0;
  mutable bool reaped_ = false;
};

}  // namespace jitckpt::proxy::client
