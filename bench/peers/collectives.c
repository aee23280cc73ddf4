/* OpenMPI's collectives, run once per command, so that another program can take turns with them.
 *
 * Rank 0 reads lines: "case OPERATION BYTES" prepares a case and answers "ready"; "run" runs it once on all ranks and answers
 * "seconds S". The end of the input ends all ranks.
 */
#define _DEFAULT_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { END, RUN, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };

static const char *const names[] = {"", "", "all_reduce", "reduce_scatter", "all_gather"};

/* Reads a command on rank 0: the action and the bytes. */
static void read_line(long told[2]) {
    char line[128], operation[64];
    long bytes;
    told[0] = END;
    if (!fgets(line, sizeof line, stdin))
        return;
    if (strncmp(line, "run", 3) == 0) {
        told[0] = RUN;
    } else if (sscanf(line, "case %63s %ld", operation, &bytes) == 2) {
        for (int i = ALL_REDUCE; i <= ALL_GATHER; i++)
            if (strcmp(operation, names[i]) == 0)
                told[0] = i, told[1] = bytes;
    }
}

/* Broadcasts rank 0's command. Waiting ranks sleep: a blocking broadcast would keep a core busy while others are measured. */
static void hand_on(long told[2]) {
    MPI_Request request;
    int done = 0;
    MPI_Ibcast(told, 2, MPI_LONG, 0, MPI_COMM_WORLD, &request);
    for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done; MPI_Test(&request, &done, MPI_STATUS_IGNORE))
        usleep(500);
}

int main(int argc, char **argv) {
    int rank, ranks;
    long operation = END;
    float *vector = NULL;
    int part = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (;;) {
        long told[2] = {END, 0};
        if (rank == 0)
            read_line(told);
        hand_on(told);
        if (told[0] == END)
            break;
        if (told[0] != RUN) {
            operation = told[0];
            part = (int)(told[1] / (long)sizeof(float) / ranks);
            free(vector);
            vector = malloc((size_t)part * ranks * sizeof(float));
            if (!vector)
                MPI_Abort(MPI_COMM_WORLD, 1);
            for (long i = 0; i < (long)part * ranks; i++)
                vector[i] = 1.0f;
            if (rank == 0)
                puts("ready"), fflush(stdout);
            continue;
        }
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        if (operation == ALL_REDUCE)
            MPI_Allreduce(MPI_IN_PLACE, vector, part * ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else if (operation == REDUCE_SCATTER)
            MPI_Reduce_scatter_block(MPI_IN_PLACE, vector, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else
            MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, vector, part, MPI_FLOAT, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0)
            printf("seconds %.9f\n", MPI_Wtime() - start), fflush(stdout);
    }
    free(vector);
    MPI_Finalize();
    return 0;
}
