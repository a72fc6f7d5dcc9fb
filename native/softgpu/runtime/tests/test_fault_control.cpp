// The control socket: who may use it, and that nothing that comes through it does harm.
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "softgpu/runtime/fault_control.h"
#include "softgpu/runtime/tests/support.h"

namespace {

constexpr int passed = 42;

// A folder for sockets, and this process as one that softgpu listens in; for a process of its own.
class Listening {
 public:
  Listening() {
    char name[] = "/tmp/softgpu-control-XXXXXX";
    EXPECT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    socket_ = folder_ + "/" + std::to_string(getpid());
    setenv("SOFTGPU_CONTROL", folder_.c_str(), 1);
    int count = 0;
    ok(cudaGetDeviceCount(&count));
  }
  [[noreturn]] void finish() const {
    std::filesystem::remove_all(folder_);
    std::_Exit(testing::Test::HasFailure() ? 1 : passed);
  }

  const std::string& folder() const { return folder_; }
  const std::string& socket() const { return socket_; }

 private:
  std::string folder_, socket_;
};

// -1: not allowed to.
int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return client;
  EXPECT_EQ(errno, EACCES);
  close(client);
  return -1;
}

std::string answer_of(int client) {
  std::string answer;
  char bytes[256];
  for (ssize_t count; (count = recv(client, bytes, sizeof bytes, 0)) > 0;)
    answer.append(bytes, static_cast<std::size_t>(count));
  close(client);
  return answer;
}

std::string ask(const std::string& path, const std::string& bytes) {
  const int client = connect_to(path);
  EXPECT_GE(client, 0);
  send(client, bytes.data(), bytes.size(), MSG_NOSIGNAL);  // it may have been refused before its end
  shutdown(client, SHUT_WR);
  return answer_of(client);
}

void takes_faults() {
  const Listening listening;
  struct stat status{};
  EXPECT_EQ(stat(listening.socket().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode, static_cast<mode_t>(S_IFSOCK | 0600));
  EXPECT_EQ(ask(listening.socket(), "kind=failed-allocation\n"),
            "ok: kind=failed-allocation call=1 is armed: allocation 1 from now on.\n");
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorMemoryAllocation);
  ok(cudaMalloc(&pointer, 1));
  EXPECT_EQ(ask(listening.socket(), "kind=burn"),
            "error: kind must be sticky, ecc, device-lost, failed-allocation, oom, "
            "collective-hang, collective-error, network-cut, slow or heal, not 'burn'.\n");
  EXPECT_EQ(ask(listening.socket(), "kind=heal\nkind=oom\n"),
            "ok: what lasted has ended, and nothing is armed any more.\n")
      << "one line a connection";
  EXPECT_EQ(ask(listening.socket(), "kind=oom rank=3"),
            "elsewhere: it is meant for rank 3, and this process has no rank (RANK in its environment).\n");
  ok(cudaMalloc(&pointer, 1));
  listening.finish();
}

// Whatever comes, the next client is served. (Nothing of it can arm a fault that fails the device: no kernel
// runs.)
void survives_any_bytes() {
  const Listening listening;
  std::mt19937 chance(2026);
  const auto below = [&chance](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(chance);
  };
  const std::string words[] = {"kind=", "sticky", "slow",        " factor=",          "9", "\n", " ",
                               "=",     "call=",  "network-cut", std::string(1, '\0')};
  for (int round = 0; round < 1000; ++round) {
    std::string bytes;
    for (std::size_t part = below(12); part > 0; --part) {
      bytes += below(3) ? words[below(std::size(words))] : std::string(1, static_cast<char>(below(256)));
    }
    if (round % 100 == 0) bytes += std::string(3000 + below(3000), 'x');
    if (round % 50 == 1) {  // some go without waiting for the answer
      close(connect_to(listening.socket()));
      continue;
    }
    const std::string answer = ask(listening.socket(), bytes);
    EXPECT_TRUE(answer.starts_with("ok: ") || answer.starts_with("error: ") ||
                answer.starts_with("elsewhere: "))
        << answer;
    EXPECT_EQ(answer.find('\n'), answer.size() - 1) << answer;
  }
  EXPECT_EQ(ask(listening.socket(), std::string(10'000, 'x')),
            "error: the line is longer than 4096 bytes.\n");
  EXPECT_EQ(ask(listening.socket(), "kind=heal"),
            "ok: what lasted has ended, and nothing is armed any more.\n");
  listening.finish();
}

void listen_and_exit(const std::string& folder) {
  setenv("SOFTGPU_CONTROL", folder.c_str(), 1);
  int count = 0;
  ok(cudaGetDeviceCount(&count));
  EXPECT_TRUE(std::filesystem::is_socket(folder + "/" + std::to_string(getpid())));
  exit(testing::Test::HasFailure() ? 1 : passed);
}

// As another user, in a process of its own.
void as_another_user(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(1);
    body();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

void refuses_other_users() {
  const Listening listening;
  as_another_user([&] { EXPECT_LT(connect_to(listening.socket()), 0) << "the folder is private"; });
  ASSERT_EQ(chmod(listening.folder().c_str(), 0755), 0);
  as_another_user([&] { EXPECT_LT(connect_to(listening.socket()), 0) << "the socket is private"; });
  ASSERT_EQ(chmod(listening.socket().c_str(), 0666), 0);
  as_another_user([&] {
    const int client = connect_to(listening.socket());
    EXPECT_GE(client, 0);
    EXPECT_EQ(answer_of(client), "error: only the user of this process may order faults.\n");
  });
  listening.finish();
}

// What a fresh process says to a folder that `make` has made something of; it returns what SOFTGPU_CONTROL is
// to be.
void count_devices_in(const std::function<std::string(const std::string&)>& make) {
  char name[] = "/tmp/softgpu-control-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  setenv("SOFTGPU_CONTROL", make(name).c_str(), 1);
  int count = -1;
  const cudaError_t error = cudaGetDeviceCount(&count);
  std::filesystem::remove_all(name);
  std::fprintf(stderr, "%s\n", cudaGetErrorName(error));
  std::_Exit(0);
}

std::string shared_with_a_group(const std::string& folder) {
  EXPECT_EQ(chmod(folder.c_str(), 0750), 0);
  return folder;
}
std::string in_no_folder(const std::string& folder) { return folder + "/none/none"; }
std::string a_link(const std::string& folder) {
  EXPECT_EQ(symlink("/tmp", (folder + "/link").c_str()), 0);
  return folder + "/link";
}

}  // namespace

TEST(FaultControl, TakesFaults) { EXPECT_EXIT(takes_faults(), testing::ExitedWithCode(passed), ""); }

TEST(FaultControl, SurvivesAnyBytes) {
  EXPECT_EXIT(survives_any_bytes(), testing::ExitedWithCode(passed), "");
}

TEST(FaultControl, IsGoneAfterExit) {
  char name[] = "/tmp/softgpu-control-XXXXXX";
  // The process that exits runs this test from its beginning, too.
  if (!std::getenv("FOLDER_OF_TEST")) setenv("FOLDER_OF_TEST", mkdtemp(name), 1);
  const std::string folder = std::getenv("FOLDER_OF_TEST");
  EXPECT_EXIT(listen_and_exit(folder), testing::ExitedWithCode(passed), "");
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(FaultControl, IsForItsUserAlone) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  EXPECT_EXIT(refuses_other_users(), testing::ExitedWithCode(passed), "");
}

TEST(FaultControl, NeedsAPrivateFolder) {
  const auto done = testing::ExitedWithCode(0);
  EXPECT_EXIT(
      count_devices_in(shared_with_a_group), done,
      "SOFTGPU_CONTROL names /tmp/(.|\n)*others than its owner(.|\n)*chmod 700(.|\n)*cudaErrorNoDevice");
  EXPECT_EXIT(count_devices_in(in_no_folder), done, "it can't be made: No such file");
  EXPECT_EXIT(count_devices_in(a_link), done, "that is no folder that can be opened");
}
