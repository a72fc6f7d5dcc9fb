#include "proxy/client/control_messages.h"

#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

namespace jitckpt::proxy::client::control {
namespace {

constexpr uint32_t version = 13;
constexpr uint32_t first_of_worker = 1, first_of_agent = 16;  // kinds, in the order of the variants

// Both go over the fields of a message in their order; little-endian, as all that CUDA runs on.
class Writer {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  void operator()(const T& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    const auto bytes = std::as_bytes(std::span(text));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  template <class T>
  void operator()(const std::vector<T>& all);
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
    requires std::is_trivially_copyable_v<T>
  void operator()(T& value) {
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
  }
  void operator()(std::string& text) {
    uint32_t length = 0;
    (*this)(length);
    const auto bytes = take(length);
    text.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  template <class T>
  void operator()(std::vector<T>& all);
  bool at_end() const { return rest_.empty(); }

 private:
  std::span<const std::byte> take(std::size_t length) {
    if (length > rest_.size()) throw BadMessage("it ends too early");
    const auto taken = rest_.first(length);
    rest_ = rest_.subspan(length);
    return taken;
  }
  std::span<const std::byte> rest_;
};

template <class Do>
void fields(Do& each, auto& m) {
  using Message = std::remove_cvref_t<decltype(m)>;
  const auto all = [&each](auto&... values) { (each(values), ...); };
  if constexpr (std::is_same_v<Message, NamedId>) all(m.key, m.id);
  if constexpr (std::is_same_v<Message, Membership>)
    all(m.key, m.parent, m.split, m.rank, m.size, m.since, m.until, m.counts);
  if constexpr (std::is_same_v<Message, Count>) all(m.state, m.peer, m.sent, m.received);
  if constexpr (std::is_same_v<Message, Making>) all(m.parent, m.split, m.key);
  if constexpr (std::is_same_v<Message, Hello>) all(m.process, m.rank, m.table_hash);
  if constexpr (std::is_same_v<Message, Alarm>) all(m.call, m.error);
  if constexpr (std::is_same_v<Message, Stopped>)
    all(m.kept_from, m.kept_to, m.images, m.copies, m.device, m.begun, m.ended, m.ready, m.log_end,
        m.failed_call, m.error, m.communicators, m.outgrown);
  if constexpr (std::is_same_v<Message, Ids>) all(m.ids, m.ending_us, m.starting_us, m.stays, m.copy);
  if constexpr (std::is_same_v<Message, HostCopy>)
    all(m.rank, m.process, m.file, m.offset, m.bytes, m.digest);
  if constexpr (std::is_same_v<Message, Done>)
    all(m.handles_us, m.image_us, m.communicators_us, m.replay_us, m.log_bytes, m.image_bytes);
  if constexpr (std::is_same_v<Message, Standing>) all(m.waited_us, m.limit_us, m.communicators);
  if constexpr (std::is_same_v<Message, Restart>) all(m.may_stay, m.finish, m.copy);
  if constexpr (std::is_same_v<Message, Replay>)
    all(m.state, m.deliver_error, m.overwrite, m.in_place, m.source, m.ids, m.creations);
  if constexpr (std::is_same_v<Message, Validates>) all(m.place, m.says, m.text, m.digest, m.unfit);
  if constexpr (std::is_same_v<Message, Validated>) all(m.place, m.valid);
  if constexpr (std::is_same_v<Message, GiveUp>) all(m.text);
  if constexpr (std::is_same_v<Message, Settled>) all(m.settled, m.text);
}

template <class T>
void Writer::operator()(const std::vector<T>& all) {
  (*this)(static_cast<uint32_t>(all.size()));
  for (const T& one : all) fields(*this, one);
}

template <class T>
void Reader::operator()(std::vector<T>& all) {
  uint32_t count = 0;
  (*this)(count);
  for (uint32_t one = 0; one < count; ++one) fields(*this, all.emplace_back());
}

template <class Message>
std::vector<std::byte> encode(const Numbered<Message>& message, uint32_t first) {
  Writer writer;
  writer(first + static_cast<uint32_t>(message.message.index()));
  writer(version);
  writer(message.number);
  std::visit([&writer](const auto& one) { fields(writer, one); }, message.message);
  return writer.take();
}

template <class Message, std::size_t index = 0>
Message read(Reader& reader, uint32_t kind) {
  if constexpr (index == std::variant_size_v<Message>) {
    throw BadMessage("there is no kind " + std::to_string(kind) + " of message");
  } else {
    if (kind != index) return read<Message, index + 1>(reader, kind);
    std::variant_alternative_t<index, Message> one{};
    fields(reader, one);
    return one;
  }
}

template <class Message>
Numbered<Message> decode(std::span<const std::byte> bytes, uint32_t first) {
  Reader reader(bytes);
  uint32_t kind = 0, spoken = 0;
  Numbered<Message> message;
  reader(kind);
  reader(spoken);
  if (spoken != version)
    throw BadMessage("it is of version " + std::to_string(spoken) + ", not " + std::to_string(version));
  reader(message.number);
  message.message = read<Message>(reader, kind - first);
  if (!reader.at_end()) throw BadMessage("it is longer than it should be");
  return message;
}

}  // namespace

int32_t rank_of_process() {
  const char* const rank = std::getenv("RANK");
  return rank ? std::atoi(rank) : 0;
}

std::vector<std::byte> encode(const Numbered<FromWorker>& message) {
  return encode(message, first_of_worker);
}
std::vector<std::byte> encode(const Numbered<FromAgent>& message) { return encode(message, first_of_agent); }
Numbered<FromWorker> decode_from_worker(std::span<const std::byte> bytes) {
  return decode<FromWorker>(bytes, first_of_worker);
}
Numbered<FromAgent> decode_from_agent(std::span<const std::byte> bytes) {
  return decode<FromAgent>(bytes, first_of_agent);
}

}  // namespace jitckpt::proxy::client::control
