#include <thread>

#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

TEST(Events, OneThatWasNeverRecordedHasHappened) {
  OwnEvent event;
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  ok(cudaEventSynchronize(event));
  OwnStream stream;
  ok(cudaStreamWaitEvent(stream, event, 0));
  ok(cudaStreamSynchronize(stream));
}

TEST(Events, HappenWhenTheStreamComesBy) {
  OwnStream stream;
  OwnEvent event;
  Gate gate(stream);
  ok(cudaEventRecord(event, stream));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  std::thread opener([&] { gate.open(); });
  ok(cudaEventSynchronize(event));
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  opener.join();
}

TEST(Events, HoldUpAStreamUntilTheyHappen) {
  OwnStream first(cudaStreamNonBlocking), second(cudaStreamNonBlocking);
  OwnEvent event(cudaEventDisableTiming);
  Diary diary;
  Gate gate(first);
  diary.note(first, 1);
  ok(cudaEventRecord(event, first));
  ok(cudaStreamWaitEvent(second, event, 0));
  diary.note(second, 2);
  gate.open();
  ok(cudaStreamSynchronize(second));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
}

TEST(Events, AWaitIsForTheRecordingOfItsTime) {
  OwnStream first(cudaStreamNonBlocking), second(cudaStreamNonBlocking), third(cudaStreamNonBlocking);
  OwnEvent event;
  Diary diary;
  ok(cudaEventRecord(event, first));
  ok(cudaStreamWaitEvent(second, event, 0));
  diary.note(second, 1);
  Gate gate(third);
  ok(cudaEventRecord(event, third));  // anew, and it won't happen yet
  ok(cudaStreamSynchronize(second));
  EXPECT_EQ(diary.read(), Numbers{1});
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST(Events, AQueryIsForTheNewestRecording) {
  OwnStream hung(cudaStreamNonBlocking), free(cudaStreamNonBlocking);
  OwnEvent event;
  Gate gate(hung);
  ok(cudaEventRecord(event, hung));
  ok(cudaEventRecord(event, free));
  ok(cudaEventSynchronize(event));
}

TEST(Events, CanBeDestroyedWhileTheyAreAwaited) {
  OwnStream first(cudaStreamNonBlocking), second(cudaStreamNonBlocking);
  Diary diary;
  Gate gate(first);
  cudaEvent_t event = nullptr;
  ok(cudaEventCreate(&event));
  diary.note(first, 1);
  ok(cudaEventRecord(event, first));
  ok(cudaStreamWaitEvent(second, event, 0));
  ok(cudaEventDestroy(event));
  diary.note(second, 2);
  gate.open();
  ok(cudaStreamSynchronize(second));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(Events, MeasureTheTimeBetweenThem) {
  OwnStream stream;
  OwnEvent start, end;
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end),
            cudaErrorInvalidResourceHandle);  // never recorded
  ok(cudaEventRecord(start, stream));
  ok(cudaLaunchHostFunc(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
  {
    Gate gate(stream);
    ok(cudaEventRecord(end, stream));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  }
  ok(cudaEventSynchronize(end));
  ok(cudaEventElapsedTime(&milliseconds, start, end));
  EXPECT_GE(milliseconds, 5.0f);
  float backwards = 0;
  ok(cudaEventElapsedTime(&backwards, end, start));
  EXPECT_EQ(backwards, -milliseconds);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST(Events, WithoutTimingHaveNoTime) {
  OwnEvent with, without(cudaEventDisableTiming);
  float milliseconds = 0;
  ok(cudaEventRecord(with, nullptr));
  ok(cudaEventRecord(without, nullptr));
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, with, without), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(Events, OnTheLegacyStreamComeAfterBlockingStreams) {
  OwnStream blocking;
  OwnEvent event;
  Gate gate(blocking);
  ok(cudaEventRecord(event, nullptr));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  gate.open();
  ok(cudaEventSynchronize(event));
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST(Events, BelongToOneDeviceAndAreAwaitedFromAll) {
  OwnEvent event;
  OwnStream first;
  ok(cudaSetDevice(1));
  OwnStream second;
  EXPECT_EQ(cudaEventRecord(event, second), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  Diary diary;
  Gate gate(first);
  diary.note(first, 1);
  ok(cudaEventRecord(event, first));
  ok(cudaStreamWaitEvent(second, event, 0));
  diary.note(second, 2);
  gate.open();
  ok(cudaStreamSynchronize(second));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
  ok(cudaSetDevice(0));
}

TEST(Events, WithUnknownFlagsAreRefused) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, 0x40), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}
