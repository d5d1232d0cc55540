/* Windows specifics with h2o.dll: paths in UTF-8 and longer than 260 characters, deleting or
 * replacing files while they are mapped, and Ctrl-C. Usage: windows MODEL.gguf [ctrl-c] */
#include <h2o.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#define CHECK(condition)                                      \
  do {                                                        \
    if (!(condition)) {                                       \
      fprintf(stderr, "line %d: " #condition "\n", __LINE__); \
      exit(1);                                                \
    }                                                         \
  } while (0)

static h2o_status load(const char* path, h2o_model** model) {
  h2o_model_options options = H2O_MODEL_OPTIONS;
  options.n_threads = 2;
  return h2o_model_load(path, &options, model);
}

static int32_t count(void* user, const char* piece, size_t n_bytes) {
  (void)piece;
  *(size_t*)user += n_bytes;
  return 0;
}

static void generates(h2o_model* model) {
  h2o_session* session;
  h2o_stream_options limits = H2O_STREAM_OPTIONS;
  size_t n_bytes = 0;
  limits.max_tokens = 10;
  limits.ignore_end = 1;
  CHECK(h2o_session_open(model, NULL, &session) == H2O_OK);
  CHECK(h2o_stream(session, "The", 3, &limits, count, &n_bytes, NULL) == H2O_OK);
  CHECK(n_bytes > 10);
  CHECK(h2o_session_free(session) == H2O_OK);
}

/* Copies the model to the directory, generates with it, and returns the path in UTF-16. */
static void try_in(const char* model_path, const wchar_t* directory) {
  static wchar_t from[4096], path[4096];
  static char utf8[16384];
  h2o_model *model, *again;
  MultiByteToWideChar(CP_UTF8, 0, model_path, -1, from, 4096);
  CHECK(CreateDirectoryW(directory, NULL) || GetLastError() == ERROR_ALREADY_EXISTS);
  swprintf(path, 4096, L"%ls\\mod\u00e8le \u6a21\u578b \U0001f999.gguf", directory);
  CHECK(CopyFileW(from, path, FALSE));
  WideCharToMultiByte(CP_UTF8, 0, path, -1, utf8, sizeof(utf8), NULL, NULL);
  CHECK(load(utf8, &model) == H2O_OK);
  generates(model);

  /* Windows does not delete a mapped file; Wine deletes it once it is unmapped. */
  const BOOL deleted = DeleteFileW(path);
  CHECK(!CopyFileW(from, path, FALSE)); /* nor is a mapped file replaced */
  CHECK(load(utf8, &again) == H2O_OK);
  CHECK(h2o_model_free(again) == H2O_OK);
  generates(model);
  CHECK(h2o_model_free(model) == H2O_OK);
  CHECK(deleted || DeleteFileW(path)); /* the file is unmapped */

  CHECK(load(utf8, &model) == H2O_CANNOT_OPEN);
  CHECK(strstr(h2o_model_error(model), "\xf0\x9f\xa6\x99") != NULL); /* names the file */
  CHECK(h2o_model_free(model) == H2O_OK);
  CHECK(RemoveDirectoryW(directory));
}

static h2o_session* streaming;
static HANDLE pressed;
static BOOL WINAPI on_ctrl_c(DWORD event) {
  if (event != CTRL_C_EVENT) return FALSE;
  h2o_cancel(streaming);
  return SetEvent(pressed);
}

static int32_t press_ctrl_c(void* user, const char* piece, size_t n_bytes) {
  if (*(size_t*)user == 0) {
    CHECK(GenerateConsoleCtrlEvent(CTRL_C_EVENT, 0));
    CHECK(WaitForSingleObject(pressed, INFINITE) == WAIT_OBJECT_0);
  }
  return count(user, piece, n_bytes);
}

static void ctrl_c(const char* path) {
  h2o_model* model;
  h2o_stream_options limits = H2O_STREAM_OPTIONS;
  h2o_generation generation = H2O_GENERATION;
  size_t n_bytes = 0;
  limits.max_tokens = 100;
  limits.ignore_end = 1;
  CHECK(load(path, &model) == H2O_OK);
  CHECK(h2o_session_open(model, NULL, &streaming) == H2O_OK);
  CHECK((pressed = CreateEventW(NULL, FALSE, FALSE, NULL)) != NULL);
  CHECK(SetConsoleCtrlHandler(on_ctrl_c, TRUE));
  CHECK(h2o_stream(streaming, "The", 3, &limits, press_ctrl_c, &n_bytes, &generation) == H2O_OK);
  CHECK(generation.finish == H2O_FINISH_CANCELLED);
  CHECK(h2o_session_free(streaming) == H2O_OK);
  CHECK(h2o_model_free(model) == H2O_OK);
}

int main(int argc, char** argv) {
  static wchar_t temporary[MAX_PATH + 1], directory[4096];
  CHECK(argc == 2 || argc == 3);
  if (argc == 3) {
    ctrl_c(argv[1]);
    puts("Ctrl-C ends a stream");
    return 0;
  }
  CHECK(GetTempPathW(MAX_PATH, temporary) > 0);
  swprintf(directory, 4096, L"%lsh2o-%lu", temporary, GetCurrentProcessId());
  try_in(argv[1], directory);
  puts("a path in UTF-8");

  /* The prefix that applications without a manifest need for long paths. */
  CHECK(CreateDirectoryW(directory, NULL));
  swprintf(directory, 4096, L"\\\\?\\%lsh2o-%lu\\", temporary, GetCurrentProcessId());
  while (wcslen(directory) < 240) wcscat(directory, L"long");
  CHECK(CreateDirectoryW(directory, NULL));
  wcscat(directory, L"\\");
  for (int i = 0; i < 30; ++i) wcscat(directory, L"longer");
  try_in(argv[1], directory);
  printf("a path of %u characters\n", (unsigned)wcslen(directory));
  *wcsrchr(directory, L'\\') = 0;
  CHECK(RemoveDirectoryW(directory));
  *wcsrchr(directory, L'\\') = 0;
  CHECK(RemoveDirectoryW(directory));
  return 0;
}
