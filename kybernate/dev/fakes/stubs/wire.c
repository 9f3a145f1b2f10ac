#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- connections: one per thread, in a list so that a forked child can close what it inherited ---- */

struct connection {
    int fd;
    long long last_id;
    struct connection *next;
};

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct connection *list;
static pthread_key_t own_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void hang_up(struct connection *connection)
{
    if (connection->fd >= 0)
        close(connection->fd);
    connection->fd = -1;
}

static void thread_ended(void *value)
{
    struct connection *connection = value;
    pthread_mutex_lock(&list_lock);
    for (struct connection **link = &list; *link; link = &(*link)->next) {
        if (*link == connection) {
            *link = connection->next;
            break;
        }
    }
    pthread_mutex_unlock(&list_lock);
    hang_up(connection);
    free(connection);
}

static void before_fork(void) { pthread_mutex_lock(&list_lock); }

static void in_parent(void) { pthread_mutex_unlock(&list_lock); }

/* The child must not speak on the parent's connections, nor keep them open when the parent has ended. */
static void in_child(void)
{
    for (struct connection *one = list; one; one = one->next)
        hang_up(one);
    pthread_mutex_unlock(&list_lock);
}

static void prepare(void)
{
    pthread_key_create(&own_key, thread_ended);
    pthread_atfork(before_fork, in_parent, in_child);
}

static struct connection *own_connection(void)
{
    pthread_once(&once, prepare);
    struct connection *connection = pthread_getspecific(own_key);
    if (connection)
        return connection;
    connection = calloc(1, sizeof *connection);
    if (!connection)
        return NULL;
    connection->fd = -1;
    pthread_mutex_lock(&list_lock);
    connection->next = list;
    list = connection;
    pthread_mutex_unlock(&list_lock);
    pthread_setspecific(own_key, connection);
    return connection;
}

static int dial(void)
{
    const char *path = getenv("KYB_FAKE_DRIVER");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || !*path || strlen(path) >= sizeof address.sun_path)
        return -1;
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int done;
    do
        done = connect(fd, (struct sockaddr *)&address, sizeof address);
    while (done < 0 && errno == EINTR);
    if (done == 0)
        return fd;
    close(fd);
    return -1;
}

static int send_all(int fd, const char *data, size_t count)
{
    while (count > 0) {
        ssize_t sent = send(fd, data, count, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return -1;
        data += sent;
        count -= (size_t)sent;
    }
    return 0;
}

/* One line without its line feed. The daemon says nothing unasked here, so nothing can follow it. */
static int read_line(int fd, char *line, size_t size)
{
    size_t have = 0;
    while (have + 1 < size) {
        ssize_t got = recv(fd, line + have, size - 1 - have, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        have += (size_t)got;
        if (line[have - 1] == '\n') {
            line[have - 1] = '\0';
            return 0;
        }
    }
    return -1;
}

/* A connection that the daemon closed since the last call is opened again; a call that it may have seen is not sent
 * again, for most calls change something. */
static int deliver(struct connection *connection, const char *request, size_t count)
{
    if (connection->fd >= 0 && send_all(connection->fd, request, count) == 0)
        return 0;
    hang_up(connection);
    connection->fd = dial();
    if (connection->fd < 0)
        return -1;
    return send_all(connection->fd, request, count);
}

int kyb_call(const char *call, const char *members, char *reply, size_t size)
{
    struct connection *connection = own_connection();
    char *request = NULL;
    reply[0] = '\0';
    if (!connection)
        return -1;
    const char *comma = members && *members ? ", " : "";
    int count = asprintf(&request, "{\"id\": %lld, \"call\": \"%s\"%s%s}\n", ++connection->last_id, call, comma,
                         members ? members : "");
    if (count < 0)
        return -1;
    int done = deliver(connection, request, (size_t)count);
    free(request);
    if (done == 0)
        done = read_line(connection->fd, reply, size);
    if (done == 0 && kyb_int(reply, "id", -1) == connection->last_id)
        return (int)kyb_int(reply, "code", -1);
    hang_up(connection);
    reply[0] = '\0';
    return -1;
}
