"""`equimoe bench`: what the parts cost here, measured beside the limit that they stand against."""
