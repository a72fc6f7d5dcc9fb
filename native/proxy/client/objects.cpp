#include "proxy/client/objects.h"

#include <algorithm>
#include <cstring>

#include "proxy/client/connection.h"
#include "proxy/client/thread.h"

namespace jitckpt::proxy::client {
namespace {

template <class Arguments>
Arguments read(const std::vector<std::byte>& content) {
  Arguments arguments;
  std::memcpy(&arguments, content.data(), sizeof arguments);
  return arguments;
}

std::vector<std::byte> joined(Bytes arguments, Bytes more) {
  std::vector<std::byte> content(arguments.begin(), arguments.end());
  content.insert(content.end(), more.begin(), more.end());
  return content;
}

bool copy_front(const std::vector<std::byte>& content, std::span<std::byte> to) {
  if (content.size() < to.size()) return false;
  std::copy_n(content.begin(), to.size(), to.begin());
  return true;
}

Objects::Kind kind_of(Call call) {
  return call == Call::make_reduction || call == Call::register_buffer ? Objects::Kind::of_communicators
                                                                       : Objects::Kind::plain;
}

}  // namespace

void Objects::add(uint64_t key, uint64_t born, Call call, int32_t device, std::vector<std::byte> content) {
  std::lock_guard lock(mutex_);
  if (call == Call::allocate) allocations_[key] = {key, read<wire::allocate>(content).bytes, device};
  current_[key] = objects_.insert(objects_.end(), {key, born, 0, call, device, std::move(content), {}});
}

void Objects::end(std::list<Object>::iterator object, uint64_t ended, bool keeps) {
  object->ended = ended;
  if (object->call == Call::allocate) allocations_.erase(object->key);
  if (keeps)
    ended_.push_back(object);
  else
    objects_.erase(object);
}

void Objects::end(uint64_t key, uint64_t ended, bool keeps) {
  std::lock_guard lock(mutex_);
  const auto object = current_.find(key);
  if (object == current_.end()) return;
  end(object->second, ended, keeps);
  current_.erase(object);
  auto setting = settings_.lower_bound({key, Call{}, 0});
  while (setting != settings_.end() && std::get<0>(setting->first) == key) {
    end(setting->second, ended, keeps);
    setting = settings_.erase(setting);
  }
}

void Objects::set(uint64_t owner, uint64_t which, uint64_t born, Call call, int32_t device,
                  std::vector<std::byte> content, bool keeps) {
  std::lock_guard lock(mutex_);
  const auto made = objects_.insert(objects_.end(), {0, born, 0, call, device, std::move(content), {}});
  const auto [setting, fresh] = settings_.try_emplace({owner, call, which}, made);
  if (fresh) return;
  end(setting->second, born, keeps);
  setting->second = made;
}

bool Objects::made_by(uint64_t key, std::span<std::byte> content) {
  std::lock_guard lock(mutex_);
  const auto object = current_.find(key);
  return object != current_.end() && copy_front(object->second->content, content);
}

bool Objects::setting(uint64_t owner, Call call, uint64_t which, std::span<std::byte> content) {
  std::lock_guard lock(mutex_);
  const auto setting = settings_.find({owner, call, which});
  return setting != settings_.end() && copy_front(setting->second->content, content);
}

void Objects::record(uint64_t event, const Recorded& recorded) {
  std::lock_guard lock(mutex_);
  if (const auto object = current_.find(event); object != current_.end()) object->second->recorded = recorded;
}

Objects::Recorded Objects::recorded(uint64_t event) {
  std::lock_guard lock(mutex_);
  const auto object = current_.find(event);
  return object == current_.end() ? Recorded{} : object->second->recorded;
}

void Objects::end_of_communicator(uint64_t communicator, uint64_t ended, bool keeps) {
  std::vector<uint64_t> belonging;
  const auto belongs = [communicator](const Object& object) {
    return (object.call == Call::make_reduction &&
            read<wire::make_reduction>(object.content).communicator == communicator) ||
           (object.call == Call::register_buffer &&
            read<wire::register_buffer>(object.content).communicator == communicator);
  };
  {
    std::lock_guard lock(mutex_);
    for (const Object& object : objects_) {
      if (object.ended == 0 && belongs(object)) belonging.push_back(object.key);
    }
  }
  for (const uint64_t object : belonging) end(object, ended, keeps);
}

void Objects::forget_ended(uint64_t before) {
  std::lock_guard lock(mutex_);
  std::erase_if(ended_, [&](const std::list<Object>::iterator& object) {
    const bool over = object->ended < before;
    if (over) objects_.erase(object);
    return over;
  });
}

std::vector<LogWriter::Apart> Objects::creations(uint64_t before, Kind kind) {
  std::lock_guard lock(mutex_);
  std::vector<LogWriter::Apart> calls;
  const auto lived = [before](const Object& object) {
    return object.born < before && (object.ended == 0 || object.ended >= before);
  };
  // A program may end a stream that cuBLAS was told to use, if it does not use it any more.
  const auto is_void = [&](const Object& object) {
    if (object.call != Call::cublasSetStream_v2) return false;
    const uint64_t stream = read<wire::cublasSetStream_v2>(object.content).streamId;
    return stream >= wire::named_streams &&
           std::ranges::none_of(objects_, [&](const Object& one) { return one.key == stream && lived(one); });
  };
  for (const Object& object : objects_) {
    if (!lived(object) || kind_of(object.call) != kind || is_void(object)) continue;
    calls.push_back({static_cast<uint16_t>(object.call), object.device, object.content});
    if (object.call == Call::cudaEventCreateWithFlags) {
      // Whoever asks for the time since an event of before, as torch's DDP does in a forward pass, gets no
      // error, though not that time.
      const wire::cudaEventRecord record{object.key, 0};
      const Bytes bytes = bytes_of(record);
      calls.push_back(
          {static_cast<uint16_t>(Call::cudaEventRecord), object.device, {bytes.begin(), bytes.end()}});
    }
  }
  return calls;
}

std::set<std::string> Objects::libraries() {
  std::lock_guard lock(mutex_);
  std::set<std::string> paths;
  const auto add = [&paths](const Object& object, std::size_t begin, std::size_t bytes) {
    paths.emplace(reinterpret_cast<const char*>(object.content.data()) + begin, bytes);
  };
  for (const Object& object : objects_) {
    if (object.call == Call::find_kernel)
      add(object, sizeof(wire::find_kernel), read<wire::find_kernel>(object.content).path_bytes);
    if (object.call == Call::make_blas)
      add(object, sizeof(wire::make_blas), read<wire::make_blas>(object.content).path_bytes);
  }
  return paths;
}

std::vector<Allocation> Objects::allocations() {
  std::lock_guard lock(mutex_);
  std::vector<Allocation> all;
  for (const auto& [address, one] : allocations_) all.push_back(one);
  return all;
}

void note_object(uint64_t key, Call call, Bytes arguments, Bytes more) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  if (!connection) return;
  const ProgramThread& thread = this_thread();
  connection->objects().add(key, thread.newest.sequence, call, thread.device, joined(arguments, more));
}

void note_setting(uint64_t owner, uint64_t which, Call call, Bytes arguments, Bytes more) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  if (!connection) return;
  const ProgramThread& thread = this_thread();
  connection->objects().set(owner, which, thread.newest.sequence, call, thread.device,
                            joined(arguments, more), connection->writer().keeps());
}

bool made_by(uint64_t key, std::span<std::byte> content) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->objects().made_by(key, content);
}

bool setting(uint64_t owner, Call call, uint64_t which, std::span<std::byte> content) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->objects().setting(owner, call, which, content);
}

void note_end(uint64_t key) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  if (!connection) return;
  const uint64_t ended = this_thread().newest.sequence;
  connection->objects().end(key, ended, connection->writer().keeps());
  if (connection->communicators().end(key, ended, connection->writer().keeps()))
    connection->objects().end_of_communicator(key, ended, connection->writer().keeps());
}

}  // namespace jitckpt::proxy::client
