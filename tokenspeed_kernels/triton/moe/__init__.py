"""Mixture of experts: routing and grouped GEMM."""
