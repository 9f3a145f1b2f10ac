/* Reading and writing JSON: enough for what json.dumps writes. Broken text is read as nothing, never beyond its end. */
#include "wire.h"

#include <stdlib.h>
#include <string.h>

static const char *skip_blanks(const char *at)
{
    while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')
        at++;
    return at;
}

static const char *skip_string(const char *at)
{
    for (at++; *at && *at != '"'; at++) {
        if (*at == '\\' && at[1])
            at++;
    }
    return *at ? at + 1 : at;
}

/* Behind the value at `at`: strings as a whole, brackets counted. */
static const char *skip_value(const char *at)
{
    int depth = 0;
    at = skip_blanks(at);
    while (*at) {
        if (*at == '"') {
            at = skip_string(at);
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (*at == '}' || *at == ']') {
            if (depth == 0)
                return at;
            depth--;
            at++;
        } else if (*at == ',' && depth == 0) {
            return at;
        } else {
            at++;
            continue;
        }
        if (depth == 0)
            return at;
    }
    return at;
}

/* The next element or member: behind the comma, or NULL at the closing bracket. */
static const char *next(const char *at)
{
    at = skip_blanks(at);
    return *at == ',' ? skip_blanks(at + 1) : NULL;
}

static const char *first(const char *json, char bracket)
{
    if (!json)
        return NULL;
    json = skip_blanks(json);
    if (*json != bracket)
        return NULL;
    json = skip_blanks(json + 1);
    return *json == ']' || *json == '}' || !*json ? NULL : json;
}

const char *kyb_member(const char *json, const char *key)
{
    size_t length = strlen(key);
    for (const char *at = first(json, '{'); at; at = next(skip_value(at))) {
        const char *name = at;
        if (*at != '"')
            return NULL;
        at = skip_blanks(skip_string(at));
        if (*at != ':')
            return NULL;
        at = skip_blanks(at + 1);
        if (strncmp(name + 1, key, length) == 0 && name[length + 1] == '"')
            return at;
    }
    return NULL;
}

int kyb_count(const char *array)
{
    int count = 0;
    for (const char *at = first(array, '['); at; at = next(skip_value(at)))
        count++;
    return count;
}

const char *kyb_element(const char *array, int index)
{
    for (const char *at = first(array, '['); at; at = next(skip_value(at))) {
        if (index-- == 0)
            return at;
    }
    return NULL;
}

long long kyb_number(const char *value, long long otherwise)
{
    char *end = NULL;
    if (!value)
        return otherwise;
    if (strncmp(value, "true", 4) == 0)
        return 1;
    if (strncmp(value, "false", 5) == 0)
        return 0;
    long long number = strtoll(value, &end, 10);
    return end == value ? otherwise : number;
}

/* A text, its escapes undone; what is not ASCII becomes '?'. */
int kyb_string(const char *value, char *out, size_t size)
{
    size_t have = 0;
    out[0] = '\0';
    if (!value || *value != '"')
        return -1;
    for (value++; *value && *value != '"'; value++) {
        char letter = *value;
        if (letter == '\\' && value[1]) {
            letter = *++value;
            if (letter == 'n')
                letter = '\n';
            if (letter == 't')
                letter = '\t';
            if (letter == 'u') {
                letter = '?';
                for (int digit = 0; digit < 4 && value[1]; digit++)
                    value++;
            }
        }
        if (have + 1 < size)
            out[have++] = letter;
    }
    out[have] = '\0';
    return 0;
}

long long kyb_int(const char *json, const char *key, long long otherwise)
{
    return kyb_number(kyb_member(json, key), otherwise);
}

int kyb_text(const char *json, const char *key, char *out, size_t size)
{
    return kyb_string(kyb_member(json, key), out, size);
}

int kyb_quote(char *out, size_t size, const char *text)
{
    size_t have = strlen(out);
    if (have + 3 > size)
        return -1;
    out[have++] = '"';
    for (; *text; text++) {
        if (have + 4 > size)
            return -1;
        if (*text == '"' || *text == '\\')
            out[have++] = '\\';
        out[have++] = (unsigned char)*text < ' ' ? ' ' : *text;
    }
    out[have++] = '"';
    out[have] = '\0';
    return 0;
}
