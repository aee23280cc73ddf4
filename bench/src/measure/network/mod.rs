//! `bench network`: workers in network namespaces of their own, joined by links of a limited rate.

mod namespaces;
