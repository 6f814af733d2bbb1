"""The papers' claims that one device can show, in the order in which they are measured.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers, C a Chinese post on SARATHI; F is a figure,
T a table, a number alone a section. Claims that share runs follow each other. Read first:
phases.py, batches.py, offline.py, serving.py. Read next: report.py."""

from lab.claims import batches, offline, phases, serving

CLAIMS = [
    phases.s_f3,
    phases.s_f4a,
    phases.s_f4b,
    phases.s_3_1,
    phases.s_f7,
    batches.s_f8,
    offline.s_t4,
    offline.s_f9,
    offline.s_f9b,
    offline.s_f11b,
    offline.s_f11,
    batches.s_f10,
    batches.s_f10b,
    batches.s_f13,
    offline.s_f13c,
    offline.s_4_4,
    batches.c_1,
    serving.ss_f7,
    batches.ss_f9,
    batches.ss_f9b,
    batches.ss_f14,
    serving.ss_f10,
    serving.ss_f12,
    serving.ss_5_2,
    serving.ss_t4,
    serving.ss_f1,
    serving.ss_4_3,
    offline.b_1,
    offline.b_1b,
    batches.b_2,
    batches.b_3,
    serving.b_7,
]
