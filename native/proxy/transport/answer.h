// The slots in which threads of the client wait for answers.
#pragma once
#include <chrono>
#include <functional>
#include <string_view>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy {

// The client's side: a free slot, or slot_count if all are taken. Give it back by clearing `taken`.
std::size_t take_slot(const Log& log);

// A new question's number. The slot waits from now on.
uint32_t begin_question(Slot& slot);
// False if the answer that the thread has read is void. It still waits then, for that of a new server.
bool end_question(Slot& slot);
// Between two servers: answers of the old one that no thread has taken are void.
void void_answers(const Log& log);

// Waits until the slot has the answer of this number. False if it is not to be waited for any more: `go_on`,
// which is asked now and then, said so.
bool wait_for_answer(Slot& slot, uint32_t number, std::chrono::microseconds spin_time,
                     const std::function<bool()>& go_on);

// The server's side; content of so many bytes lies in the slot. The text says what has failed, or is empty.
void answer(Slot& slot, uint32_t number, int32_t result, std::size_t bytes, std::string_view text);

// Copies a text into an array, cut if need be, with a zero at its end.
void put_text(char* to, std::size_t capacity, std::string_view text);

}  // namespace jitckpt::proxy
