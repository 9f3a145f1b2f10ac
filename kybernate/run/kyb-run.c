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
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef GRACE_MS
#define GRACE_MS 60000 /* an engine that lives so long after a signal to end has not taken it for one */
#endif

enum {
	MOST_ANSWER = 65536, /* bytes of an answer of the gate */
	MOST_ENDS = 256,     /* bytes of the file "ends" that are compared */
	RETRY_MS = 200,      /* pause before a gate that cannot be reached is asked again */
	WITHIN_MS = 60000,   /* for so long an answer permits a start at most, and where it does not say */
	LONG_MS = 2000,      /* what the engine has left behind is named then */
	NOT_FOUND = 127,
	NOT_EXECUTABLE = 126,
	USAGE = 64,
};

extern char **environ;

static const char *seat; /* the seat folder; NULL: this container has no seat */
static int signals = -1; /* a signalfd: nothing interrupts a system call */
static pid_t engine;     /* 0 while it does not run */
static int ended;        /* its status as waitpid has it, once it has ended */
static long stops;       /* it got a signal to end then, so its end soon after is that of the container */
static int *late;        /* shared with the child: its permission was over, so it has not become the engine */
static char known[MOST_ENDS]; /* what the node had announced when the engine was permitted */
static long until;       /* the permission to start ends then, on CLOCK_MONOTONIC in ms */

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
	struct pollfd log = {.fd = STDERR_FILENO, .events = POLLOUT};
	if (poll(&log, 1, 0) <= 0)
		return; /* a log that takes nothing must not stop this process */
	if (write(STDERR_FILENO, text, strlen(text)) < 0)
		return; /* no reader is left */
}

static long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
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
	if (ends)
		stops = now_ms();
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

/* A file that the node has written into the seat folder. Empty: there is none. */
static void read_file(const char *name, char text[MOST_ENDS])
{
	memset(text, 0, MOST_ENDS);
	int folder = open_seat(), file = folder < 0 ? -1 : openat(folder, name, O_RDONLY | O_CLOEXEC);
	if (file >= 0 && read(file, text, MOST_ENDS - 1) < 0)
		text[0] = 0;
	close(file);
	close(folder);
}

/* Until when kubelet's gate has permitted the start of this container. Without the file it does not say. */
static long permit(void)
{
	char text[MOST_ENDS];
	read_file("permit", text);
	return text[0] ? strtol(text, NULL, 10) : LONG_MAX;
}

/* --- the start gate ----------------------------------------------------------------------------------------------- */

static int connect_gate(void)
{
	/* Through the open folder: its path may be longer than an address of a socket. */
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	int folder = open_seat(), file = folder < 0 ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
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
		if (got < 0 && (errno == EINTR || errno == EAGAIN))
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
 * last line is "start". NULL: the answer is no permission; `why` is its text. "within MS": it is one for so long from the
 * question on, which was `asked` then: whatever has paused the node or this process, it ends where the node's ends. */
static char **permitted(char *answer, long asked, const char **why)
{
	char **variables = copied(environ, NULL), *rest = answer, *line;
	int starts = 0;
	until = asked + WITHIN_MS;
	*why = "its answer is not complete";
	while ((line = strsep(&rest, "\n")) && rest) { /* a line without its end does not count */
		starts = strcmp(line, "start") == 0;
		if (strncmp(line, "set ", 4) == 0 && line[4] != '=' && strchr(line, '=')) {
			char **changed = copied(variables, line + 4);
			forget(variables);
			variables = changed;
		} else if (strncmp(line, "within ", 7) == 0) {
			long ms = strtol(line + 7, NULL, 10);
			until = asked + (ms < WITHIN_MS ? ms : WITHIN_MS);
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
		long asked = now_ms(), again = asked + RETRY_MS; /* a gate that answers after its full wait is asked again at once */
		const char *why;
		read_file("ends", known); /* before the permission: what is announced after it is about its engine */
		if (ask(answer) >= 0) {
			char **variables = permitted(answer, asked, &why);
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

/* The child looks at the clock itself, as the last thing that it does: while this process is alone after the end of a
 * permission, no engine comes of it any more. */
static void start(char **command, char **variables)
{
	pid_t self = getpid();
	*late = 0;
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
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	environ = variables;
	*late = now_ms() >= until;
	if (*late)
		_exit(0);
	execvp(command[0], command);
	int why = errno;
	say("cannot start %s: %s", command[0], strerror(why));
	_exit(why == ENOENT ? NOT_FOUND : NOT_EXECUTABLE);
}

/* Wait until nothing lives that the engine has started; what keeps this process from the gate is named once. */
static void wait_for_rest(const char *command)
{
	long then = now_ms() + LONG_MS;
	int named = 0;
	while (reap()) {
		long left = then - now_ms();
		if (named || left > 0) {
			wait_for(-1, named ? -1 : (int)left);
			continue;
		}
		char path[64], pids[200] = "";
		snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
		int file = open(path, O_RDONLY | O_CLOEXEC);
		if (file >= 0 && read(file, pids, sizeof pids - 1) < 0)
			pids[0] = 0;
		close(file);
		say("it waits for the end of pid %swhich %s has left behind", pids, command);
		named = 1;
	}
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
	late = mmap(NULL, sizeof *late, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(late == MAP_FAILED ? NULL : late);

	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL); /* whatever started this process ignores: children are collected, the engine decides */
	sigset_t all;
	sigfillset(&all);
	for (const int *one = (const int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, 0}; *one; one++)
		sigdelset(&all, *one);
	sigprocmask(SIG_BLOCK, &all, NULL);
	signals = signalfd(-1, &all, SFD_CLOEXEC);
	prctl(PR_SET_CHILD_SUBREAPER, 1);

	char found[MOST_ENDS];
	char **variables = copied(environ, NULL);
	read_file("ends", known);
	until = permit();
	for (;;) {
		start(command, variables);
		forget(variables);
		while (reap(), engine)
			wait_for(-1, -1);
		read_file("ends", found);
		int was_late = *late, stopped = stops && now_ms() - stops < GRACE_MS;
		if (stopped || !(was_late || (found[0] && strcmp(known, found) != 0)))
			return exit_code(ended);
		if (was_late)
			say("the permission to start %s is over; it asks for another one", command[0]);
		else
			say("the node has ended %s; it starts again when the node permits", command[0]);
		wait_for_rest(command[0]);
		variables = wait_at_gate();
		say("starts %s", command[0]);
	}
}
