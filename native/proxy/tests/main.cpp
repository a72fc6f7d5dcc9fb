#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "proxy/tests/support.h"

namespace {
std::string program;
}

pid_t find_server(pid_t client) {
  const std::vector<pid_t> servers = find_servers(client);
  return servers.empty() ? 0 : servers.front();
}

std::vector<pid_t> find_servers(pid_t client) {
  std::vector<pid_t> servers;
  // Each thread has children of its own.
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/" + std::to_string(client) + "/task")) {
    std::ifstream children(thread.path() / "children");
    for (pid_t child; children >> child;) {
      std::ifstream command("/proc/" + std::to_string(child) + "/cmdline");
      std::string name;
      std::getline(command, name, '\0');
      if (name == PROXY_SERVER) servers.push_back(child);
    }
  }
  return servers;
}

bool ends(pid_t process) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto lives = [process] {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    const std::string state(std::istreambuf_iterator<char>(file), {});
    return !state.empty() && state.find(") Z") == std::string::npos;
  };
  while (lives()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

std::string hex(const ncclUniqueId& id) {
  std::string text;
  char byte[3];
  for (const char value : id.internal) {
    std::snprintf(byte, sizeof byte, "%02x", static_cast<unsigned char>(value));
    text += byte;
  }
  return text;
}

ncclUniqueId id_of(const char* text) {
  ncclUniqueId id;
  for (char& value : id.internal) {
    unsigned byte = 0;
    std::sscanf(text, "%2x", &byte);
    value = static_cast<char>(byte);
    text += 2;
  }
  return id;
}

Ended run_alone(const std::string& test, const std::vector<std::string>& variables) {
  std::string command = "PROXY_TEST_ALONE=1 ";
  for (const std::string& variable : variables) command += variable + " ";
  command += "exec " + program + " --gtest_filter=" + test + " 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  Ended ended{-1, ""};
  if (!pipe) return ended;
  std::array<char, 4096> piece;
  while (const std::size_t bytes = fread(piece.data(), 1, piece.size(), pipe))
    ended.output.append(piece.data(), bytes);
  const int status = pclose(pipe);
  ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ended;
}

bool alone() { return std::getenv("PROXY_TEST_ALONE") != nullptr; }

int main(int argc, char** argv) {
  program = argv[0];
  // Those of a test that is ended for taking too long end with it.
  if (alone()) prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* const devices = std::getenv("PROXY_TEST_DEVICES");
  setenv("SOFTGPU_DEVICES", devices ? devices : "2", 1);
  setenv("SOFTGPU_MEMORY", "67108864", 1);
  setenv("JITCKPT_PROXY_SERVER", PROXY_SERVER, 0);
  unsetenv("CUDA_VISIBLE_DEVICES");
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
