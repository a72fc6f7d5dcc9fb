#include "proxy/tests/ranks_job.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"

int number_of(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

void Store::set(const std::string& name, const std::string& value) const {
  const std::string unfinished = folder_ + "/." + name;
  std::ofstream(unfinished) << value;
  std::filesystem::rename(unfinished, folder_ + "/" + name);
}

std::string Store::get(const std::string& name) const {
  while (!std::filesystem::exists(folder_ + "/" + name))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::stringstream text;
  text << std::ifstream(folder_ + "/" + name).rdbuf();
  return text.str();
}

ncclComm_t meet(const Store& store, const std::string& name) {
  const int rank = number_of("RANK");
  ncclUniqueId id{};
  if (rank == 0) {
    ok(ncclGetUniqueId(&id));
    store.set(name, hex(id));
  } else {
    id = id_of(store.get(name).c_str());
  }
  ncclComm_t made = nullptr;
  ok(ncclCommInitRank(&made, number_of("WORLD_SIZE"), id, rank));
  return made;
}

void kill_server() {
  const pid_t server = jitckpt_proxy_server();
  ASSERT_GT(server, 0);  // else all processes of this group would be meant
  kill(server, SIGKILL);
}

namespace {

bool tell(pid_t server, const std::string& text) {
  const std::string path = std::string(std::getenv("SOFTGPU_CONTROL")) + "/" + std::to_string(server);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  char answer[300] = "";
  const bool told = connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                    send(connection, (text + "\n").data(), text.size() + 1, MSG_NOSIGNAL) > 0 &&
                    read(connection, answer, sizeof answer - 1) > 0;
  close(connection);
  return told && std::string(answer).rfind("ok", 0) == 0;
}

}  // namespace

void order_fault(const std::string& text) {
  while (!tell(jitckpt_proxy_server(), text)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void print(const char* what, const std::vector<int>& numbers) {
  std::printf("seen %s:", what);
  for (const int number : numbers) std::printf(" %d", number);
  std::printf("\n");
}

void Job::run(const std::string& test, const std::vector<std::string>& variables) {
  const std::string folder = temporary_folder("jitckpt-store-");
  coordinator.start();
  std::vector<std::thread> processes;
  for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
    processes.emplace_back([&, rank] {
      std::vector<std::string> all = variables;
      all.insert(all.end(),
                 {"PROXY_TEST_DEVICES=4", "RANK=" + std::to_string(rank),
                  "WORLD_SIZE=" + std::to_string(outputs.size()), "PROXY_TEST_STORE=" + folder,
                  "SOFTGPU_CONTROL=" + folder + "/faults", "JITCKPT_PROXY_CONTROL=" + coordinator.path(),
                  "JITCKPT_PROXY_TOGETHER=" + coordinator.together() + "#" + std::to_string(rank)});
      outputs[rank] = run_alone(test, all);
    });
  }
  for (std::thread& process : processes) process.join();
  std::filesystem::remove_all(folder);
  for (const Ended& ended : outputs) EXPECT_EQ(ended.status, 0) << ended.output;
}

std::vector<std::string> Job::seen() const {
  std::vector<std::string> all;
  for (const Ended& ended : outputs) {
    std::istringstream lines(ended.output);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("seen ", 0) == 0) all.push_back(line);
    }
  }
  return all;
}
