/* A compiler that writes down what it is asked, to the file that STUB_LOG names, and returns a text as the cubin. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char cubin[64];

int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
  for (int i = 0; i < headers; ++i)
    if (strlen(texts[i]) < 100 || strstr(source, "#include") == NULL || strchr(names[i], '.') == NULL) return 1;
  *program = strdup(name);
  return 0;
}
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
  FILE *log = fopen(getenv("STUB_LOG"), "a");
  fprintf(log, "compile %s", (char *)program);
  for (int i = 0; i < count; ++i) fprintf(log, " %s", options[i]);
  fputc('\n', log);
  fclose(log);
  if (getenv("STUB_COMPILE_FAILS")) return 6;
  snprintf(cubin, sizeof cubin, "compiled %s", options[0]);
  return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *size) {
  (void)program;
  *size = strlen(cubin);
  return 0;
}
int nvrtcGetCUBIN(void *program, char *out) {
  (void)program;
  memcpy(out, cubin, strlen(cubin));
  return 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *size) {
  (void)program;
  *size = 9;
  return 0;
}
int nvrtcGetProgramLog(void *program, char *out) {
  (void)program;
  memcpy(out, "line 7 !", 9);
  return 0;
}
int nvrtcDestroyProgram(void **program) {
  free(*program);
  return 0;
}
