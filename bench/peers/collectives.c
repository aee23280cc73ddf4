/* OpenMPI's collectives, and a clipped step by hand, run once per command, so that another program can take turns with them.
 *
 * Rank 0 reads lines: "case OPERATION BYTES TIMES" prepares a case and answers "ready"; "run" runs it TIMES times on all ranks and
 * answers "seconds S". The end of the input ends all ranks.
 */
#define _DEFAULT_SOURCE
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { END, RUN, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, STEP };

static const char *const names[] = {"", "", "all_reduce", "reduce_scatter", "all_gather", "step"};

/* One rank's memory of a case; the last three are a step's. */
static float *vector, *params, *m, *v;
static long len;
static int ranks;

/* Reads a command on rank 0: the action, the bytes and the times. */
static void read_line(long told[3]) {
    char line[128], operation[64];
    long bytes, times;
    told[0] = END;
    if (!fgets(line, sizeof line, stdin))
        return;
    if (strncmp(line, "run", 3) == 0) {
        told[0] = RUN;
    } else if (sscanf(line, "case %63s %ld %ld", operation, &bytes, &times) == 3) {
        for (int i = ALL_REDUCE; i <= STEP; i++)
            if (strcmp(operation, names[i]) == 0)
                told[0] = i, told[1] = bytes, told[2] = times;
    }
}

/* Broadcasts rank 0's command. Waiting ranks sleep: a blocking broadcast would keep a core busy while others are measured. */
static void hand_on(long told[3]) {
    MPI_Request request;
    int done = 0;
    MPI_Ibcast(told, 3, MPI_LONG, 0, MPI_COMM_WORLD, &request);
    for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done; MPI_Test(&request, &done, MPI_STATUS_IGNORE))
        usleep(500);
}

static float *filled(float value) {
    float *made = malloc(len * sizeof(float) + 1);
    if (!made)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (long i = 0; i < len; i++)
        made[i] = value;
    return made;
}

/* Sums the gradients, clips their mean to norm 1, and updates all parameters with AdamW on every rank. */
static void step(void) {
    MPI_Allreduce(MPI_IN_PLACE, vector, (int)len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    float lanes[16] = {0}, squares = 0.0f;
    long i = 0;
    for (; i + 16 <= len; i += 16)
        for (int lane = 0; lane < 16; lane++)
            lanes[lane] += vector[i + lane] * vector[i + lane];
    for (; i < len; i++)
        squares += vector[i] * vector[i];
    for (int lane = 0; lane < 16; lane++)
        squares += lanes[lane];
    float norm = sqrtf(squares) / ranks, scale = (norm > 1.0f ? 1.0f / norm : 1.0f) / ranks;
    float *restrict p = params, *restrict g = vector, *restrict first = m, *restrict second = v;
    for (i = 0; i < len; i++) {
        float x = g[i] = scale * g[i];
        first[i] = 0.9f * first[i] + 0.1f * x;
        second[i] = 0.999f * second[i] + 0.001f * x * x;
        p[i] = p[i] * (1.0f - 1e-11f) - 1e-9f * first[i] / (sqrtf(second[i]) + 1e-8f);
    }
}

static void once(long operation) {
    int part = (int)(len / ranks);
    if (operation == ALL_REDUCE)
        MPI_Allreduce(MPI_IN_PLACE, vector, (int)len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (operation == REDUCE_SCATTER)
        MPI_Reduce_scatter_block(MPI_IN_PLACE, vector, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (operation == ALL_GATHER)
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, vector, part, MPI_FLOAT, MPI_COMM_WORLD);
    else
        step();
}

/* Prepares a case of `bytes` bytes on each rank. */
static void prepare(long operation, long bytes) {
    free(vector), free(params), free(m), free(v);
    vector = params = m = v = NULL;
    len = bytes / (long)sizeof(float);
    vector = filled(1.0f);
    if (operation == STEP)
        params = filled(0.5f), m = filled(0.01f), v = filled(0.01f);
}

int main(int argc, char **argv) {
    int rank;
    long operation = END, times = 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (;;) {
        long told[3] = {END, 0, 1};
        if (rank == 0)
            read_line(told);
        hand_on(told);
        if (told[0] == END)
            break;
        if (told[0] != RUN) {
            operation = told[0], times = told[2];
            prepare(operation, told[1]);
            if (rank == 0)
                puts("ready"), fflush(stdout);
            continue;
        }
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (long i = 0; i < times; i++)
            once(operation);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0)
            printf("seconds %.9f\n", MPI_Wtime() - start), fflush(stdout);
    }
    free(vector), free(params), free(m), free(v);
    MPI_Finalize();
    return 0;
}
