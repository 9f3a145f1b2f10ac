/*
 * The way from the stub libraries to the fake GPU daemon (kybernate.dev.fakes.gpu): one JSON line there, one back.
 *
 * Thread-safe: every thread has its own connection, so a call that hangs holds up its own thread only.
 * Fork-safe: a child closes what it inherited and opens its own, because the daemon knows callers by SO_PEERCRED.
 * Nothing here raises signals, and connections are closed on exec.
 */
#ifndef KYB_WIRE_H
#define KYB_WIRE_H

#include <stddef.h>

/* Marks what the library exports; everything else is hidden (-fvisibility=hidden). */
#define KYB_EXPORT __attribute__((visibility("default")))

/* Big enough for every reply of the daemon: 64 GPUs, each with readings, and their links. */
#define KYB_REPLY_SIZE (1 << 18)

/*
 * Make a call. `members` are the call's arguments as JSON members without braces ("\"pid\": 7, \"timeout_ms\": 5"),
 * NULL or "" for none. The whole reply line goes to `reply`.
 * Returns the reply's CUresult number (0 = success), or -1 with an empty reply when the daemon named by
 * KYB_FAKE_DRIVER cannot be reached, went away before it answered, or answered more than `size` bytes.
 */
int kyb_call(const char *call, const char *members, char *reply, size_t size);

/* The number that member `key` of the object `json` has (1 and 0 for true and false), else `otherwise`. */
long long kyb_int(const char *json, const char *key, long long otherwise);

/* Copy the text of member `key`, cut to `size`. Returns 0, or -1 (and an empty text) if there is no such text. */
int kyb_text(const char *json, const char *key, char *out, size_t size);

/* The value of member `key` inside `json` (which must outlive it), or NULL. For objects in objects and arrays. */
const char *kyb_member(const char *json, const char *key);

/* How many elements the array at `array` has; 0 if it is none (NULL included). */
int kyb_count(const char *array);

/* The element `index` of the array at `array`, or NULL. Objects can go straight into kyb_int, kyb_text, kyb_member. */
const char *kyb_element(const char *array, int index);

/* A number or text that is an element itself, as kyb_int and kyb_text do for members. */
long long kyb_number(const char *value, long long otherwise);
int kyb_string(const char *value, char *out, size_t size);

/* Append `text` to the JSON in `out` (capacity `size`) as a quoted JSON string. Returns 0, or -1 if it has no room. */
int kyb_quote(char *out, size_t size, const char *text);

#endif
