// Servers that an agent starts: what it is given, what it says, and what happens without it.
#include "proxy/client/agent_starter.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/unix_socket.h"
#include "proxy/tests/support.h"

namespace {

using jitckpt::proxy::client::AgentStarter;
using jitckpt::proxy::client::Connection;

// A question of a library's, with the files that came with it.
struct Question {
  std::string text;
  std::vector<int> files;
};

// An agent of one process, which starts what it is asked for, as its own child.
class Agent {
 public:
  Agent() : path_(testing::TempDir() + "agent-" + std::to_string(getpid())) {
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    thread_ = std::thread([this] { run(); });
  }
  ~Agent() {
    end();
    close(listener_);
    unlink(path_.c_str());
    for (const pid_t process : started) kill(process, SIGKILL), waitpid(process, nullptr, 0);
  }
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // Once who has asked is gone. Then the rest may be looked at.
  void end() {
    shutdown(listener_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }

  int connect() const { return jitckpt::proxy::client::connect_to(path_); }
  std::string variable() const { return "JITCKPT_PROXY_SERVERS=" + path_; }

  std::vector<pid_t> started;
  std::string environment;  // of the newest

 private:
  void run() {
    const int socket = accept(listener_, nullptr, nullptr);
    if (socket < 0) return;
    ucred peer{};
    socklen_t size = sizeof peer;
    getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    for (Question question = hear(socket); !question.text.empty(); question = hear(socket)) {
      if (question.text.starts_with("start "))
        say(socket, start(question, peer.pid));
      else
        say(socket, {"was ended by Killed", {}});
      for (const int file : question.files) close(file);
    }
    close(socket);
  }

  static Question hear(int socket) {
    std::array<char, 4096> text{};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(6 * sizeof(int))> given{};
    iovec room{text.data(), text.size()};
    msghdr message{nullptr, 0, &room, 1, given.data(), given.size(), 0};
    const ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (bytes <= 0) return {};
    Question question{std::string(text.data(), static_cast<std::size_t>(bytes)), {}};
    if (const cmsghdr* const header = CMSG_FIRSTHDR(&message)) {
      question.files.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(question.files.data(), CMSG_DATA(header), question.files.size() * sizeof(int));
    }
    return question;
  }

  static void say(int socket, Question answer) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> given{};
    iovec text{answer.text.data(), answer.text.size()};
    msghdr message{nullptr, 0, &text, 1, nullptr, 0, 0};
    if (!answer.files.empty()) {
      message.msg_control = given.data();
      message.msg_controllen = given.size();
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), answer.files.data(), sizeof(int));
    }
    EXPECT_GT(sendmsg(socket, &message, MSG_NOSIGNAL), 0);
    for (const int file : answer.files) close(file);
  }

  Question start(const Question& question, pid_t client) {
    EXPECT_EQ(question.files.size(), 6u);
    std::string program = question.text.substr(6), number = std::to_string(client);
    struct stat status{};
    fstat(question.files[5], &status);
    environment.resize(static_cast<std::size_t>(status.st_size));
    EXPECT_EQ(pread(question.files[5], environment.data(), environment.size(), 0), status.st_size);
    std::vector<char*> variables, words = {program.data(), number.data(), nullptr};
    for (std::size_t at = 0; at < environment.size(); at += std::strlen(&environment[at]) + 1)
      variables.push_back(&environment[at]);
    variables.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    std::vector<int> copies;
    for (int place = 1; place <= 5; ++place) {
      copies.push_back(fcntl(question.files[place - 1], F_DUPFD_CLOEXEC, 10));
      posix_spawn_file_actions_adddup2(&actions, copies.back(), place);
    }
    pid_t process = 0;
    const int error =
        posix_spawn(&process, program.c_str(), &actions, nullptr, words.data(), variables.data());
    posix_spawn_file_actions_destroy(&actions);
    for (const int copy : copies) close(copy);
    if (error != 0) return {std::strerror(error), {}};
    started.push_back(process);
    return {"started " + number_of(process), {static_cast<int>(syscall(SYS_pidfd_open, process, 0))}};
  }

  static std::string number_of(pid_t process) { return std::to_string(process); }

  std::string path_;
  int listener_;
  std::thread thread_;
};

bool has_ended(int process_file) {
  pollfd state{process_file, POLLIN, 0};
  return poll(&state, 1, 0) == 1;
}

TEST(AgentStarter, StartsAProgramWithItsFilesAndItsEnvironment) {
  int pipes[3][2];
  for (auto& pipe : pipes) ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
  Agent agent;
  const std::string text(100'000, 'x');  // four of them are more than a message has room for
  const std::vector<std::string> variables = {"NAME=value with = and spaces", "A=" + text, "B=" + text,
                                              "C=" + text, "D=" + text};
  {
    AgentStarter starter(agent.connect());
    const auto started = starter.start("/bin/sleep", variables, pipes[0][1], pipes[1][1], pipes[2][1]);
    ASSERT_TRUE(started);
    EXPECT_FALSE(has_ended(started->process_file));
    const std::string place = "/proc/" + std::to_string(started->process) + "/fd/";
    std::array<char, 64> link{}, expected{};
    for (int file = 0; file < 3; ++file) {
      const std::string ours = "/proc/self/fd/" + std::to_string(pipes[file][1]);
      ASSERT_GT(readlink((place + std::to_string(3 + file)).c_str(), link.data(), link.size()), 0);
      ASSERT_GT(readlink(ours.c_str(), expected.data(), expected.size()), 0);
      EXPECT_EQ(link, expected);
    }
    syscall(SYS_pidfd_send_signal, started->process_file, SIGKILL, nullptr, 0);
    pollfd state{started->process_file, POLLIN, 0};
    EXPECT_EQ(poll(&state, 1, 10'000), 1);
    EXPECT_EQ(starter.end_of(started->process), "was ended by Killed");
    close(started->process_file);
  }
  agent.end();
  std::string expected_environment;
  for (const std::string& variable : variables) expected_environment += variable + '\0';
  EXPECT_TRUE(agent.environment == expected_environment);
  for (auto& pipe : pipes) close(pipe[0]), close(pipe[1]);
}

TEST(AgentStarter, SaysWhyAProgramCantBeStarted) {
  Agent agent;
  AgentStarter starter(agent.connect());
  try {
    starter.start("/nowhere", {"NAME=value"}, 0, 1, 2);
    FAIL() << "it has started nothing";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "No such file or directory");
  }
}

TEST(AgentStarter, GivesUpAnAgentThatIsGone) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  AgentStarter starter(sockets[0]);
  close(sockets[1]);
  EXPECT_FALSE(starter.start("/bin/cat", {"NAME=value"}, 0, 1, 2));
  EXPECT_FALSE(starter.start("/bin/cat", {"NAME=value"}, 0, 1, 2));
  EXPECT_EQ(starter.end_of(1), "ended");
}

TEST(Alone, AsksForMemoryAndLooksForChildren) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const DeviceInts numbers(10, 3);
  launch_add(numbers.get(), 1);
  EXPECT_EQ(numbers.read()[0], 4);
  std::printf("children: %zu, waits: %d\n", find_servers().size(), waitpid(-1, nullptr, WNOHANG));
}

TEST(AgentStarter, AProgramHasItsServerFromTheAgent) {
  Agent agent;
  const Ended ended = run_alone("Alone.AsksForMemoryAndLooksForChildren", {agent.variable()});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("children: 0, waits: -1"), std::string::npos) << ended.output;
  agent.end();
  ASSERT_EQ(agent.started.size(), 1u);
  EXPECT_TRUE(ends(agent.started[0]));
}

// How many files of this process stand for others.
long process_files() {
  return std::ranges::count_if(std::filesystem::directory_iterator("/proc/self/fd"), [](const auto& file) {
    std::error_code gone;
    return std::filesystem::read_symlink(file, gone).string().find("pidfd") != std::string::npos;
  });
}

// Has all that is to be in the files by which this process could be made again.
Connection& settled() {
  int32_t result = 0;
  Connection& connection = *Connection::get(jitckpt::proxy::Library::cudart, result);
  connection.pause();
  while (!connection.is_quiet()) std::this_thread::yield();
  EXPECT_EQ(connection.settle(), "");
  EXPECT_EQ(process_files(), 0);
  EXPECT_FALSE(connection.server_is_gone());
  return connection;
}

// Who has called a kernel since what is kept, and settled behind it.
struct Settled {
  Settled() : numbers(10, 3) {
    EXPECT_EQ(jitckpt_proxy_keep(), 0);
    server = jitckpt_proxy_server();
    launch_add(numbers.get(), 1);
    connection = &settled();
  }
  const DeviceInts numbers;
  int server;
  Connection* connection;
};

TEST(Alone, SettlesAndGoesOn) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const Settled before;
  std::thread thread([&before] { launch_add(before.numbers.get(), 2); });
  before.connection->watch_again();
  EXPECT_EQ(process_files(), 1);
  EXPECT_TRUE(before.connection->go_on_from_pause());
  thread.join();
  EXPECT_EQ(before.numbers.read()[0], 6);
  EXPECT_EQ(jitckpt_proxy_server(), before.server);
}

TEST(Alone, SettlesAndFindsItsServerGone) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  const Settled before;
  kill(before.server, SIGKILL);
  while (!before.connection->server_is_gone()) std::this_thread::yield();
  before.connection->watch_again();
  EXPECT_EQ(process_files(), 0);
  EXPECT_TRUE(before.connection->go_on_from_pause());
  launch_add(before.numbers.get(), 2);
  EXPECT_EQ(before.numbers.read()[0], 6);
  EXPECT_NE(jitckpt_proxy_server(), before.server);
}

TEST(AgentStarter, AServerStaysWhileItsProgramIsWrittenToFiles) {
  for (const auto& [test, servers] :
       {std::pair("Alone.SettlesAndGoesOn", 1u), std::pair("Alone.SettlesAndFindsItsServerGone", 2u)}) {
    Agent agent;
    const Ended ended = run_alone(test, {agent.variable()});
    EXPECT_EQ(ended.status, 0) << ended.output;
    agent.end();
    EXPECT_EQ(agent.started.size(), servers) << ended.output;
  }
}

TEST(AgentStarter, AProgramStartsItsServerWhereNobodyListens) {
  const Ended ended = run_alone("Alone.AsksForMemoryAndLooksForChildren", {"JITCKPT_PROXY_SERVERS=/nowhere"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_NE(ended.output.find("children: 1, waits: 0"), std::string::npos) << ended.output;
}

}  // namespace
