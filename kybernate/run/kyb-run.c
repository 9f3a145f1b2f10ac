/* kyb-run: the first process of an engine's container.
 *
 *     kyb-run -- llama-server -m model.gguf
 *
 * Starts the engine, passes signals on, collects zombies, and ends with the engine's exit code. When the node ends the
 * engine to park it, kyb-run stays: it asks the node for GPUs and starts the engine again. docs/dev/start-gate.md has the
 * protocol. Nothing believes this program: that the engine holds no memory, the node reads from the driver.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	MOST_ANSWER = 65536, /* bytes of an answer of the gate */
	MOST_ENDS = 256,     /* bytes of the file "ends" that are compared */
	RETRY_MS = 200,      /* pause before a gate that cannot be reached is asked again */
	NOT_FOUND = 127,
	NOT_EXECUTABLE = 126,
	USAGE = 64,
};

extern char **environ;

static const char *seat; /* the seat folder; NULL: this container has no seat */
static int signals = -1; /* a signalfd: nothing interrupts a system call */
static sigset_t before;  /* the signal mask that the engine gets */
static pid_t engine;     /* 0 while it does not run */
static int ended;        /* its status as waitpid has it, once it has ended */
static int stops;        /* it got a signal to end, so its end is that of the container */

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void say(const char *format, ...)
{
	char text[1024] = "kyb-run: ";
	size_t used = strlen(text);
	va_list args;
	va_start(args, format);
	vsnprintf(text + used, sizeof text - used - 1, format, args);
	va_end(args);
	strcat(text, "\n");
	if (write(STDERR_FILENO, text, strlen(text)) < 0)
		return; /* no reader is left */
}

static int exit_code(int status)
{
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Collect children that have ended. Returns whether one is left. */
static int reap(void)
{
	for (;;) {
		int status;
		pid_t pid = waitpid(-1, &status, WNOHANG);
		if (pid <= 0)
			return pid == 0;
		if (pid == engine) {
			engine = 0;
			ended = status;
		}
	}
}

/* Take one waiting signal in: the engine gets it; without an engine one that would end it ends this process. */
static void take_signal(void)
{
	struct signalfd_siginfo info;
	if (read(signals, &info, sizeof info) != sizeof info)
		return;
	int number = (int)info.ssi_signo, ends = number == SIGTERM || number == SIGINT || number == SIGQUIT;
	if (number == SIGCHLD || number == SIGPIPE) /* this process wrote to a log without a reader */
		return;
	stops |= ends;
	if (engine > 0)
		kill(engine, number);
	else if (ends)
		exit(128 + number);
}

/* Wait for a signal, or until `file` (-1: none) can be read. Returns whether it can. `ms` < 0: without a limit. */
static int wait_for(int file, int ms)
{
	struct pollfd both[2] = {{.fd = signals, .events = POLLIN}, {.fd = file, .events = POLLIN}};
	if (poll(both, 2, ms) <= 0)
		return 0;
	if (both[0].revents)
		take_signal();
	return both[1].revents != 0;
}

static long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void pause_until(long then)
{
	for (long left; (left = then - now_ms()) > 0; reap())
		wait_for(-1, (int)left);
}

/* The seat folder, opened anew: the node may have replaced it. */
static int open_seat(void)
{
	return seat ? open(seat, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
}

/* What the node has written about the last engine that it ended in this seat. Empty: nothing. */
static void read_ends(char text[MOST_ENDS])
{
	memset(text, 0, MOST_ENDS);
	int folder = open_seat(), file = folder < 0 ? -1 : openat(folder, "ends", O_RDONLY | O_CLOEXEC);
	if (file >= 0 && read(file, text, MOST_ENDS - 1) < 0)
		text[0] = 0;
	close(file);
	close(folder);
}

/* --- the start gate ----------------------------------------------------------------------------------------------- */

static int connect_gate(void)
{
	/* Through the open folder: its path may be longer than an address of a socket. */
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	int folder = open_seat(), file = folder < 0 ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/gate.sock", folder);
	int failed = file < 0 || connect(file, (struct sockaddr *)&to, sizeof to) < 0, why = errno;
	close(folder);
	if (!failed)
		return file;
	close(file);
	errno = why;
	return -1;
}

/* Ask for a start. Returns the bytes of the answer, which ends with the connection; -1: there is none, see errno. */
static ssize_t ask(char answer[MOST_ANSWER])
{
	static const char question[] = "start\n";
	int file = connect_gate();
	if (file < 0)
		return -1;
	ssize_t length = 0;
	if (send(file, question, sizeof question - 1, MSG_NOSIGNAL) != (ssize_t)(sizeof question - 1))
		length = -1;
	while (length >= 0 && length < MOST_ANSWER - 1) {
		if (!wait_for(file, -1)) {
			reap();
			continue;
		}
		ssize_t got = read(file, answer + length, (size_t)(MOST_ANSWER - 1 - length));
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			length = -1;
		if (got <= 0)
			break;
		length += got;
	}
	int why = errno;
	close(file);
	errno = why;
	if (length >= 0)
		answer[length] = 0;
	return length;
}

static void *must(void *memory)
{
	if (memory)
		return memory;
	say("no memory");
	exit(1);
}

static void forget(char **variables)
{
	for (char **one = variables; *one; one++)
		free(*one);
	free(variables);
}

/* A copy of an environment; with `pair`, NAME=VALUE, in which NAME has this value. */
static char **copied(char **variables, const char *pair)
{
	size_t name = pair ? (size_t)(strchr(pair, '=') - pair) + 1 : 0, count = 0, at = 0;
	while (variables[count])
		count++;
	char **copy = must(calloc(count + 2, sizeof *copy));
	for (size_t i = 0; i < count; i++)
		if (!pair || strncmp(variables[i], pair, name) != 0)
			copy[at++] = must(strdup(variables[i]));
	if (pair)
		copy[at] = must(strdup(pair));
	return copy;
}

/* The environment of the next start: that of the container, changed by the lines "set NAME=VALUE" of an answer whose
 * last line is "start". NULL: the answer is no permission; `why` is its text. */
static char **permitted(char *answer, const char **why)
{
	char **variables = copied(environ, NULL), *rest = answer, *line;
	int starts = 0;
	*why = "its answer is not complete";
	while ((line = strsep(&rest, "\n")) && rest) { /* a line without its end does not count */
		starts = strcmp(line, "start") == 0;
		if (strncmp(line, "set ", 4) == 0 && line[4] != '=' && strchr(line, '=')) {
			char **changed = copied(variables, line + 4);
			forget(variables);
			variables = changed;
		} else if (strncmp(line, "wait ", 5) == 0) {
			*why = line + 5;
		}
	}
	if (starts)
		return variables;
	forget(variables);
	return NULL;
}

/* Ask the gate until it permits a start. Returns the environment of that start. */
static char **wait_at_gate(void)
{
	static char answer[MOST_ANSWER];
	char last[200] = "";
	for (;;) {
		long again = now_ms() + RETRY_MS; /* a gate that answers after its full wait is asked again at once */
		const char *why;
		if (ask(answer) >= 0) {
			char **variables = permitted(answer, &why);
			if (variables)
				return variables;
		} else {
			why = strerror(errno);
		}
		if (strncmp(last, why, sizeof last - 1) != 0) {
			snprintf(last, sizeof last, "%s", why);
			say("the start gate: %s", last);
		}
		pause_until(again);
	}
}

/* --- the engine --------------------------------------------------------------------------------------------------- */

static void start(char **command, char **variables)
{
	pid_t self = getpid();
	engine = fork();
	if (engine < 0) {
		say("cannot start %s: %s", command[0], strerror(errno));
		exit(NOT_EXECUTABLE);
	}
	if (engine > 0)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* where this is not process 1 of a namespace, nothing else ends it */
	if (getppid() != self)
		_exit(128 + SIGKILL);
	sigprocmask(SIG_SETMASK, &before, NULL);
	environ = variables;
	execvp(command[0], command);
	int why = errno;
	say("cannot start %s: %s", command[0], strerror(why));
	_exit(why == ENOENT ? NOT_FOUND : NOT_EXECUTABLE);
}

int main(int count, char **words)
{
	char **command = words + 1;
	if (count > 1 && strcmp(words[1], "--") == 0)
		command++;
	if (command[0] == NULL) {
		say("no command: kyb-run -- COMMAND [ARGUMENT ...]");
		return USAGE;
	}
	seat = getenv("KYB_SEAT_DIR");

	sigset_t all;
	sigfillset(&all);
	for (const int *one = (const int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, 0}; *one; one++)
		sigdelset(&all, *one);
	sigprocmask(SIG_BLOCK, &all, &before);
	signals = signalfd(-1, &all, SFD_CLOEXEC);
	prctl(PR_SET_CHILD_SUBREAPER, 1);

	char known[MOST_ENDS], found[MOST_ENDS];
	char **variables = copied(environ, NULL); /* kubelet's gate has let this container through */
	for (;;) {
		read_ends(known); /* what is there now is about an earlier engine */
		start(command, variables);
		forget(variables);
		while (reap(), engine)
			wait_for(-1, -1);
		read_ends(found);
		if (stops || !found[0] || strcmp(known, found) == 0)
			return exit_code(ended);
		say("the node has ended %s; it starts again when the node permits", command[0]);
		while (reap())
			wait_for(-1, -1);
		variables = wait_at_gate();
		say("starts %s", command[0]);
	}
}
