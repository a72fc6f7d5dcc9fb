#include "memory_tier/transfer.h"

#include <algorithm>
#include <bit>
#include <string>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are sent as they lie in memory");

// Before a chunk: its number, and size. After it, the other way: its number, and whether it is right.
struct Word {
  uint32_t number, says;
};
constexpr uint32_t right = 1, wrong = 2;
constexpr uint32_t gives_up = 0;  // in the place of a size: no chunk is empty

void say(ChunkConnection& connection, Word word, bool more_follows = false) {
  connection.send(std::as_bytes(std::span(&word, 1)), more_follows);
}

Word hear(ChunkConnection& connection) {
  Word word;
  connection.receive(std::as_writable_bytes(std::span(&word, 1)));
  return word;
}

[[noreturn]] void nonsense() { throw ChunkFailure(Reason::nonsense, "what came is not what belongs there"); }

[[noreturn]] void damaged(uint64_t number) {
  throw ChunkFailure(Reason::damaged, "its checksum is another", number);
}

// Sends a chunk as the pace has it.
void send_chunk(ChunkConnection& connection, std::span<const std::byte> left, Pace& pace) {
  while (!left.empty()) {
    const Pace::Turn turn = pace.take(left.size(), Pace::Clock::now());
    if (turn.bytes == 0) {
      connection.wait_until(turn.when);
      continue;
    }
    connection.send(left.first(turn.bytes), false);
    left = left.subspan(turn.bytes);
  }
}

// So much is received before its checksum goes on: to be woken more often takes longer than to read it again
// from a cache that is farther away.
constexpr size_t at_once = 1 << 20;

// Receives a chunk and says whether it is right.
bool receive_chunk(ChunkConnection& connection, std::span<std::byte> to, const Digest& expected,
                   Digester& digester) {
  for (size_t begin = 0; begin < to.size(); begin += at_once) {
    const auto piece = to.subspan(begin, std::min(at_once, to.size() - begin));
    connection.receive(piece);
    digester.add(piece);
  }
  return digester.finish() == expected;
}

// Where each chunk goes that is received.
using Places = std::function<std::span<std::byte>(uint64_t number)>;

// The chunks that are on their way when one is found wrong are received and thrown away.
[[noreturn]] void give_up(ChunkConnection& connection, uint64_t number, uint64_t chunks,
                          const Places& place) {
  say(connection, {static_cast<uint32_t>(number), wrong});
  std::vector<std::byte> thrown_away(place(0).size());
  for (uint64_t after = number + 1;; ++after) {
    const Word word = hear(connection);
    if (word.says == gives_up) damaged(number);
    if (word.number != after || after >= chunks || after >= number + most_unanswered ||
        word.says != place(after).size())
      nonsense();
    connection.receive(std::span(thrown_away).first(word.says));
  }
}

void receive_all(ChunkConnection& connection, std::span<const Digest> digests, const Places& place,
                 const Taker& take) {
  Digester digester;
  for (uint64_t number = 0; number < digests.size(); ++number) {
    const std::span<std::byte> chunk = place(number);
    const Word word = hear(connection);
    if (word.number != number || word.says != chunk.size()) nonsense();
    if (!receive_chunk(connection, chunk, digests[number], digester))
      give_up(connection, number, digests.size(), place);
    take(number, chunk);
    say(connection, {static_cast<uint32_t>(number), right});
  }
}

}  // namespace

void send_chunks(ChunkConnection& connection, const Window& from, std::span<const Digest> digests,
                 Pace& pace) {
  from.check(digests.size());
  uint64_t answered = 0;
  const auto hear_answer = [&](uint64_t next) {
    const Word word = hear(connection);
    if (word.number != answered || (word.says != right && word.says != wrong)) nonsense();
    if (word.says == wrong) {
      say(connection, {static_cast<uint32_t>(next), gives_up});
      if (digest_of(from.chunk(answered)) != digests[answered]) damaged(answered);
      throw ChunkFailure(Reason::refused, "the other side says that its checksum is another", answered);
    }
    ++answered;
  };
  for (uint64_t number = 0; number < digests.size(); ++number) {
    while (answered < number && (answered + most_unanswered <= number || connection.has_something()))
      hear_answer(number);
    say(connection, {static_cast<uint32_t>(number), static_cast<uint32_t>(from.chunk(number).size())}, true);
    send_chunk(connection, from.chunk(number), pace);
  }
  while (answered < digests.size()) hear_answer(digests.size());
}

void receive_chunks(ChunkConnection& connection, const Window& to, std::span<const Digest> digests) {
  to.check(digests.size());
  if (to.chunks() > 0 && !to.is_writable()) throw ChunkFailure(Reason::no_memory, "it can only be read");
  receive_all(connection, digests, [&](uint64_t number) { return to.chunk(number); }, [](auto, auto) {});
}

void receive_each(ChunkConnection& connection, uint64_t size, uint64_t chunk, std::span<const Digest> digests,
                  const Taker& take) {
  if (chunk == 0 || chunk > most_chunk || digests.size() != size / chunk + (size % chunk != 0))
    throw ChunkFailure(Reason::no_memory, "it has another number of chunks than of checksums");
  std::vector<std::byte> scratch(std::min(chunk, size));
  const auto place = [&](uint64_t number) {
    return std::span(scratch).first(std::min(chunk, size - number * chunk));
  };
  receive_all(connection, digests, place, take);
}

}  // namespace jitckpt::memory_tier
